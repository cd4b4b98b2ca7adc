"""TorchDEQ's model zoo at small width, as cells that both libraries solve: ``benchmarks/bench_zoo.py`` compares them.

- ``sequence``: the DEQ-Transformer, a language model with relative positions and a memory of the segment before.
- ``multiscale``: MDEQ, resolutions of an image in equilibrium with each other.
- ``graph``: IGNN, features that travel along chains until they have arrived.
- ``flow``: DEQ-Flow, a convolutional GRU that looks up correlations where the present flow points.
- ``representation``: DEQ-INR, a photograph as a function of the place.
"""

from benchmarks.zoo.base import Model, drop_in, layer_of, torchdeq_way, train
from benchmarks.zoo.flow import FlowUpdate
from benchmarks.zoo.graph import Chains
from benchmarks.zoo.multiscale import MDEQ
from benchmarks.zoo.oracle import Exact, doubled, exact, flat, gradient
from benchmarks.zoo.representation import Photograph
from benchmarks.zoo.sequence import LanguageModel
from benchmarks.zoo.tally import Tally, tallied

ZOO: dict[str, type[Model]] = {
    "sequence": LanguageModel,
    "multiscale": MDEQ,
    "graph": Chains,
    "flow": FlowUpdate,
    "representation": Photograph,
}

__all__ = [
    "ZOO",
    "Exact",
    "Model",
    "Tally",
    "doubled",
    "drop_in",
    "exact",
    "flat",
    "gradient",
    "layer_of",
    "tallied",
    "torchdeq_way",
    "train",
]
