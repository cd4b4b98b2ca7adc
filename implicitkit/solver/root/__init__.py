"""Methods for roots, ``F(z) = 0``: one file a method."""
