"""The built-in rules: importing this module registers every one of them."""

from implicitkit.rule import implicit, series, unroll

__all__ = ["implicit", "series", "unroll"]
