"""Numbers found by a loop on plain tensors, below every transform (``implicitkit.extend.constants``).

A projection that is the root of an equation is found here by iteration, as a constant, and given its derivatives
afterwards by a few steps of the chord method with a frozen Jacobian ``J``: ``u <- u - J^{-1} F(u, v)``.  Each step makes
one more derivative of ``u(v)`` exact (the error ``e_k`` obeys ``e_{k+1} = O(|v - v_0| e_k)``), so that :data:`ORDER` steps
give every derivative up to that order, in every mode, out of elementary operations.
"""

from __future__ import annotations

ORDER = 3
"""Derivatives of projections that are exact."""
