"""Linear systems of optimality conditions: a Hessian bordered by the gradients of constraints."""
