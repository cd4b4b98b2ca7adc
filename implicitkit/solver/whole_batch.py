"""What is known of all samples of a batch from which some have been dropped."""

from __future__ import annotations

from torch import Tensor

__all__ = ["WholeBatch"]


class WholeBatch:
    """Results of all samples while only some are in work.

    Attributes:
        values: by name, each ``(batch, ...)``. index: which samples are in work; ``None``: all of them.
    """

    def __init__(self, batch: int) -> None:
        self.batch = batch
        self.values: dict[str, Tensor] = {}
        self.index: Tensor | None = None

    def store(self, **values: Tensor) -> None:
        for name, value in values.items():
            if self.index is None:
                self.values[name] = value.clone()
            else:
                if name not in self.values:
                    self.values[name] = value.new_zeros(self.batch, *value.shape[1:])
                self.values[name].index_copy_(0, self.index, value)

    def store_some(self, samples: Tensor, kept: dict[str, Tensor]) -> None:
        """What is kept of some of those that are in work; of the others it is not known yet."""
        where = samples if self.index is None else self.index.index_select(0, samples)
        for name, value in kept.items():
            if f"kept {name}" not in self.values:
                self.values[f"kept {name}"] = value.new_zeros(self.batch, *value.shape[1:])
            self.values[f"kept {name}"].index_copy_(0, where, value)

    def narrow(self, samples: Tensor) -> None:
        self.index = samples if self.index is None else self.index.index_select(0, samples)

    def merge(self, value: Tensor, name: str) -> Tensor:
        assert self.index is not None
        return self.values[name].index_copy(0, self.index, value)
