"""How the derivative of a solution is formed: one file a family of rules."""
