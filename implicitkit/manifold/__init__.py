r"""States that are no vectors: rotations, rigid motions, unit quaternions, products of these and of vectors.

    pose = ik.least_squares(residuals, z0, (data,), manifold=ik.manifold.SE3()).value
    ik.least_squares(residuals, {"pose": T0, "points": X0}, manifold={"pose": ik.manifold.SE3(), "points": None})

A manifold moves a point by a vector of its tangent space, ``retract(z, delta)``, with ``retract(z, 0) = z``; near
every point that is a chart.  A solver works on ``delta``; the chart is moved until the solution lies at its origin,
and there the implicit function theorem holds in the coordinates ``delta``:

    d\delta = -H^{-1} (dg/d\theta) d\theta,    dz = D_\delta retract(z^*, 0) d\delta

with ``g`` the gradient of ``f(retract(z^*, delta), \theta)`` by ``delta`` at 0 and ``H`` its Hessian.  ``retract(z^*,
delta)`` with fixed ``z^*`` is the solution in a whole neighbourhood of ``\theta``, so that derivatives of every order
are exact.  A derivative of ``z`` is one of the numbers it is written in, and tangent to the manifold; ``local(z^*,
.)`` of it is ``d delta``.

A manifold of one's own is a subclass of :class:`Manifold` in one file.

Source: Absil, Mahony & Sepulchre (2008), *Optimization Algorithms on Matrix Manifolds*, chapters 4 and 5
(retractions); Solà, Deray & Atchuthan (2018), "A micro Lie theory for state estimation in robotics", arXiv 1812.01537
(the groups).
"""

from implicitkit.manifold.base import Manifold
from implicitkit.manifold.groups import SE3, SO3, UnitQuaternion
from implicitkit.manifold.product import Euclidean, Product

__all__ = ["SE3", "SO3", "Euclidean", "Manifold", "Product", "UnitQuaternion"]
