"""Any optimiser of ``torch.optim`` as a solver."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from implicitkit.foundation import trees
from implicitkit.solver.evaluations import Evaluations
from implicitkit.solver.method import Method

# These treat every number by itself: a matrix of samples is as good as one sample after another.
_ELEMENTWISE = frozenset(
    ("ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
)


class TorchOptim(Method):
    """``ik.TorchOptim(torch.optim.Adam, lr=0.1)``: the steps that this optimiser takes on the objective of each sample.

    Every sample has an optimiser state of its own (moments, step counts), frozen when it has converged and dropped with it:
    a batch gives what its samples give alone.  Optimisers known to work number by number get the whole matrix; any other
    class gets one parameter a sample, since it may take norms over a parameter.  An optimiser must not need a closure
    (``torch.optim.LBFGS``: use ``ik.LBFGS``).

    Convergence is judged by the gradient as everywhere.  With a constant learning rate many of these methods end in a small
    cycle around the minimum: loosen ``rtol`` or refine with ``lbfgs``.

    Args:
        optimizer: the class. options: its own options, by keyword.

    Raises:
        TypeError: ``optimizer`` is no optimiser class, needs a closure, or does not know an option.
        ValueError: what the optimiser says of an option's value.
    """

    name: ClassVar[str] = "torch_optim"
    solves: ClassVar[str] = "minimise"
    default_max_steps: ClassVar[int] = 10000

    def __init__(self, optimizer: Callable[..., Any], **options: Any) -> None:
        if not (isinstance(optimizer, type) and issubclass(optimizer, torch.optim.Optimizer)):
            raise TypeError(f"TorchOptim takes a class such as torch.optim.Adam and its options; got {optimizer!r}")
        if issubclass(optimizer, torch.optim.LBFGS):
            raise TypeError(
                "torch.optim.LBFGS evaluates the objective by a closure, all samples together: use ik.LBFGS"
            )
        self.optimizer, self.options = optimizer, options
        try:
            self._new([torch.zeros(1, 1, device="cpu")])
        except TypeError as error:
            raise TypeError(
                f"torch.optim.{optimizer.__name__} does not take these options, {options}: {error}"
            ) from error

    def __repr__(self) -> str:
        options = "".join(f", {name}={value!r}" for name, value in self.options.items())
        return f"TorchOptim({self.optimizer.__name__}{options})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TorchOptim) and (self.optimizer, self.options) == (other.optimizer, other.options)

    def __hash__(self) -> int:
        return hash((self.optimizer, tuple(self.options)))

    @property
    def _together(self) -> bool:
        return self.optimizer.__module__.startswith("torch.optim.") and self.optimizer.__name__ in _ELEMENTWISE

    def _new(self, tensors: list[Tensor]) -> tuple[list[torch.nn.Parameter], Any]:
        parameters = [torch.nn.Parameter(t.clone()) for t in tensors]
        return parameters, self.optimizer(parameters, **self.options)

    def init(self, f: Evaluations, z: Tensor) -> list[dict[str, Any]]:
        return [{}] if self._together else [{} for _ in range(z.shape[0])]

    def step(self, f: Evaluations, z: Tensor, state: list[dict[str, Any]]) -> tuple[Tensor, list[dict[str, Any]]]:
        g = f(z)
        pairs = [(z, g)] if self._together else [(z[i], g[i]) for i in range(z.shape[0])]
        parameters, optimizer = self._new([point for point, _ in pairs])
        for parameter, (_, gradient), known in zip(parameters, pairs, state, strict=True):
            parameter.grad = gradient.clone()
            if known:
                optimizer.state[parameter] = trees.tree_map(_copy, known)
        optimizer.step()
        points = [parameter.detach() for parameter in parameters]
        state = [dict(optimizer.state[parameter]) for parameter in parameters]
        return points[0] if self._together else torch.stack(points), state

    def select(self, state: list[dict[str, Any]], index: Tensor) -> list[dict[str, Any]]:
        return super().select(state, index) if self._together else [state[i] for i in index.tolist()]


def _copy(x: Any) -> Any:
    return x.clone() if isinstance(x, Tensor) else x
