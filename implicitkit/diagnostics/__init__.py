"""What can be said about a solution once it is found."""

from implicitkit.diagnostics.certificate import Certificate, certify
from implicitkit.diagnostics.kkt_regularity import Degeneracy, degeneracy
from implicitkit.diagnostics.linear_stability import Stability, stability

__all__ = ["Certificate", "Degeneracy", "Stability", "certify", "degeneracy", "stability"]
