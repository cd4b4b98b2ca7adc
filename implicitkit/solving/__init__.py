"""What a user calls: the verb ``solve`` with its shorthands, ``@ik.implicit``, ``curve_fit``."""
