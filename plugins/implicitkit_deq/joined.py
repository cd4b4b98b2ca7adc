"""One equilibrium instead of many layers: feed-forward networks tied, stacked equilibria merged."""

from __future__ import annotations

from typing import Any

from torch import nn

import implicitkit as ik
from implicitkit_deq.cells.tied import Tied
from implicitkit_deq.held.frozen import BATCH_NORMS
from implicitkit_deq.layer import DEQ
from implicitkit_deq.merging import merged


def tie_weights(network: nn.Sequential, **options: Any) -> DEQ:
    r"""A feed-forward network as a DEQ that computes the same, value and derivatives (theorem 3; see :class:`Tied`).

    Solved block by block, which is the network's own forward pass (each layer once, and once more to see that it holds);
    with ``solver="picard"`` all layers at once, as many times as there are layers.  A network with BatchNorm, whose training
    couples the samples, is one joint system (``batch_dims=0``) unless the options say otherwise.

    Shapes: ``x`` and the output are those of the network, the batch first.  Units: the network's own.  Source: Bai,
    Kolter & Koltun (2019), theorem 3.

    Args:
        network: its modules are shared, not copied. options: as in :class:`DEQ`.

    Returns:
        A :class:`DEQ` with ``layer(x) == network(x)`` and ``layer.cell`` of class :class:`Tied`.
    """
    coupled = isinstance(network, nn.Module) and any(isinstance(m, BATCH_NORMS) for m in network.modules())
    return DEQ(Tied(network), **{"solver": ik.Blocks(inner="picard"), "batch_dims": 0 if coupled else 1, **options})


def merge(first: DEQ, second: DEQ) -> DEQ:
    r"""``first >> second``: one DEQ on the joint map, whose output is that of ``second(first(x))`` (theorem 2).

    The cells are shared, not copied; those of merged layers are joined side by side, so that ``a >> b >> c`` has three
    blocks.  Each block keeps the solvers that its layer trains and is evaluated with (``ik.Blocks``: one block after
    another); another ``solver``, as in ``merged.using(solver="anderson")``, takes all of it as one system.  Tolerances and
    all other settings are those of ``first``.  Solves start as by default, or, where ``init="last"`` in both layers, from
    the last equilibrium; other starts (``init``) and ``pretraining`` stay behind.

    Source: Bai, Kolter & Koltun (2019), theorem 2.

    Raises:
        TypeError: not two layers. ValueError: they differ in ``batch_dims`` or ``dtype``.
    """
    result: DEQ = merged(first, second, DEQ)
    return result
