"""Systems of nonlinear equations as torch functions: ``systems("mgh", "classic", "engineering", "equilibrium", "large")``.

- ``mgh``: Moré, Garbow & Hillstrom (1981), all that are systems of equations (with MINPACK's square forms of three).
- ``classic``: further systems of the testing literature, most of them small and awkward.
- ``engineering``: boundary-value problems, integral equations, networks, batches of scalar equations.
- ``equilibrium``: steady states of rate equations, chemical equilibria, fixed points.
- ``large``: discretised equations with thousands of unknowns.
"""

from benchmarks.systems import classic, engineering, equilibrium, large, mgh
from benchmarks.systems.base import TestSystem, systems

__all__ = ["TestSystem", "classic", "engineering", "equilibrium", "large", "mgh", "systems"]
