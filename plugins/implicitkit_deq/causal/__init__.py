"""Sequences whose positions must not see what comes after them."""
