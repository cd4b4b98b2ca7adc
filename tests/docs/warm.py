"""What most pages import and run first, done once: the process from which those of the pages are forked imports this.

The first derivative of a process costs some seconds (torch imports and scripts what it needs for it), and so do plots and
SciPy.  Nothing is left behind but imported modules: no seed, no default, no thread.
"""

from __future__ import annotations

import os

os.environ.setdefault("MPLBACKEND", "Agg")

import matplotlib.pyplot as plt
import scipy.optimize
import scipy.sparse.linalg  # noqa: F401
import torch

import implicitkit as ik
import implicitkit_cvxpy
import implicitkit_deq


def derivatives() -> None:
    """A backward, forward modes, batches, a layer."""
    torch.set_num_threads(1)

    def solve(x: torch.Tensor) -> torch.Tensor:
        return ik.root(lambda z, x: z**3 + z - x, torch.ones_like(x), (x,)).value

    x = torch.ones(2, dtype=torch.float64, requires_grad=True)
    solve(x).sum().backward()
    torch.func.hessian(lambda x: solve(x).sum())(x.detach())
    torch.vmap(solve)(x.detach())
    implicitkit_deq.DEQ(lambda z, x: torch.tanh(0.3 * z + x), (2,))(x[None].detach()).sum()


derivatives()
implicitkit_cvxpy.ConvexLayer  # noqa: B018  (imports cvxpy)
plt.close(plt.figure())
