"""x"""

from implicitkit.testing.check import Suite, Subject

PROGRAMS = Suite("solver", Subject)
