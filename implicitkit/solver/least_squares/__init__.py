"""Methods for nonlinear least squares: one file a method."""
