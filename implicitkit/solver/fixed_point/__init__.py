"""Methods for fixed points, ``z = f(z)``: one file a method."""
