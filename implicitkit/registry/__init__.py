"""Names for solvers, rules, linear solvers and problems, and the plugins that add to them."""
