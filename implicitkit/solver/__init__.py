"""How a point is found: one file a method, in a folder by what it solves."""
