r"""Units told by the data alone, for programs that no solver has come near to in the units that they were given in.

The logarithms of the units are those with which the entries of ``[P, q]`` and of ``[A, b]``, of the latter with the rows
``0`` and ``1`` of a second-order cone added and subtracted, are nearest to one in the sense of least squares:

    min  sum_j (log|A_ij| + r_i + d_j)^2 + (log|b_i| + r_i)^2 + (log|q_j| + d_j + t)^2 + (log|P_jj| + 2 d_j + t)^2

over what is not zero, with ``r`` those of automorphisms.  A budget of 1e8 under powers has unknowns of all sizes from 1 to
1e32, as many as there are powers; these are found exactly.

Source: Curtis & Reid (1972), "On the automatic scaling of matrices for Gaussian elimination", J. Inst. Maths Applics 10,
for linear rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from implicitkit_cvxpy.backends import Data
from implicitkit_cvxpy.cones import DualCone
from implicitkit_cvxpy.cones.product import Group
from implicitkit_cvxpy.cones.semidefinite import order_of
from implicitkit_cvxpy.units import Units

_LITTLE = 1e-6  # of the smallest units, where several serve


def balanced(dual: DualCone, data: Data) -> Units:
    """Units of programs whose matrices are dense."""
    P, q, A, b = (t.detach() for t in data[:4])
    heads = dual.heads.to(b.device)
    E, bent = (t.to(b) for t in _exponents(dual))
    numbers = _lights(heads, A), _lights(heads, b), q, P.diagonal(dim1=1, dim2=2)
    W, u, v, p = ((t != 0).to(b) for t in numbers)
    L, l_b, l_q, l_p = (-torch.where(t != 0, t.abs(), 1).log2() for t in numbers)
    n, k = q.shape[1], E.shape[1]
    N = b.new_zeros(len(b), k + n + 1, k + n + 1)
    N[:, :k, :k] = E.mT @ ((W.sum(2) + u).unsqueeze(2) * E)
    N[:, :k, k:-1] = E.mT @ W
    N[:, k:-1, k:-1] = torch.diag_embed(W.sum(1) + v + 4 * p)
    N[:, k:-1, -1] = v + 2 * p
    N[:, -1, -1] = (v + p).sum(1)
    N = N.triu() + N.triu(1).mT + _LITTLE * torch.eye(k + n + 1, dtype=b.dtype, device=b.device)
    right = torch.cat([(L.sum(2) + l_b) @ E, L.sum(1) + l_q + 2 * l_p, (l_q + l_p).sum(1, keepdim=True)], 1)
    steps, columns, objective = torch.linalg.solve(N, right).round().tensor_split((k, k + n), 1)
    users = Units.users(dual, data)
    boost, shift = steps[:, bent == _BOOST], steps[:, bent == _SHIFT]
    rows = (torch.where(bent == 0, steps, 0) @ E.mT).exp2()
    turn = users.turn._replace(rows=rows, boost=boost, shift=shift)
    return Units(columns.exp2(), objective.exp2(), users.least, turn)


def _lights(heads: Tensor, t: Tensor) -> Tensor:
    """``(s_0, s_1)`` of second-order cones as ``(s_0 + s_1, s_0 - s_1)``, ``(batch, m)`` or ``(batch, m, n)``."""
    head, side = t[:, heads], t[:, heads + 1]
    return t.index_copy(1, heads, head + side).index_copy(1, heads + 1, head - side)


_BOOST, _SHIFT = 1, 2


def _exponents(dual: DualCone) -> tuple[Tensor, Tensor]:
    """How often each row has which unit as a factor, ``(m, number)``, and which are boosts and shifts, ``(number,)``."""
    linear = dual.cones.linear
    blocks, kinds = [torch.eye(linear, dtype=torch.float64, device="cpu")], [0] * linear
    for group in dual.groups:
        for i in range(group.number):
            block = _of_cone(group, i)
            blocks.append(block)
            kinds += {"soc": [0, _BOOST], "exp": [0, _SHIFT]}.get(group.kind, [0] * block.shape[1])
    return torch.block_diag(*blocks)[-dual.cones.size :], torch.tensor(kinds, device="cpu")


def _of_cone(group: Group, i: int) -> Tensor:
    if group.kind == "soc":
        rows = [[1.0, 1.0], [1.0, -1.0], *[[1.0, 0.0]] * (group.size - 2)]
    elif group.kind == "exp":
        rows = [[1.0, 0.0], [1.0, 0.0], [1.0, 1.0]]
    elif group.kind == "power":
        rows = [[1.0, 0.0], [0.0, 1.0], [group.alpha[i], 1 - group.alpha[i]]]
    else:
        one = torch.eye(order_of(group.size), dtype=torch.float64, device="cpu")
        return torch.stack([one[i] + one[j] for j in range(len(one)) for i in range(j + 1)])
    return torch.tensor(rows, dtype=torch.float64, device="cpu")
