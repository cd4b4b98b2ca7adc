"""What can be said about a solution once it is found."""

from implicitkit.diagnostics.certificate import Certificate, certify

__all__ = ["Certificate", "certify"]
