"""Results of all samples while fewer and fewer of them are in work: against a list that is kept by hand."""

from __future__ import annotations

import pytest
import torch

from implicitkit.solver.whole_batch import WholeBatch


@pytest.mark.parametrize("seed", range(8))
def test_every_sample_has_what_was_last_known_of_it(seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    batch = 9
    whole, at_work = WholeBatch(batch), torch.arange(batch)
    known, kept = torch.zeros(batch, 2), torch.zeros(batch)
    for _ in range(4):
        value = torch.randn(len(at_work), 2, generator=g)
        whole.store(z=value)
        known[at_work] = value
        ended = torch.randperm(len(at_work), generator=g)[: len(at_work) // 3].sort().values
        mark = torch.randn(len(ended), generator=g)
        whole.store_some(ended, {"mark": mark})
        kept[at_work[ended]] = mark
        torch.testing.assert_close(whole.values["z"], known, rtol=0, atol=0)
        torch.testing.assert_close(whole.values["kept mark"], kept, rtol=0, atol=0)
        left = torch.ones(len(at_work), dtype=torch.bool).index_fill(0, ended, False).nonzero().squeeze(1)
        whole.narrow(left)
        at_work = at_work[left]
    now = torch.randn(len(at_work), 2, generator=g)
    known[at_work] = now
    torch.testing.assert_close(whole.merge(now, "z"), known, rtol=0, atol=0)


def test_what_comes_later_is_zero_of_samples_that_had_ended() -> None:
    whole = WholeBatch(3)
    whole.store(a=torch.ones(3))
    whole.narrow(torch.tensor([2, 0]))
    whole.store(b=torch.tensor([5.0, 7.0]))
    assert whole.values["b"].tolist() == [7.0, 0.0, 5.0]
