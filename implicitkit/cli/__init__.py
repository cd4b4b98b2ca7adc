"""The command line, ``python -m implicitkit``."""
