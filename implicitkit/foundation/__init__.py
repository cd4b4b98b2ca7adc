"""What everything stands on: errors, pytrees, linear operators, products with Jacobians, options, private names of torch."""
