"""The progress bar."""

from __future__ import annotations

import builtins
import gc
import io
from typing import Any

import pytest
import torch

import implicitkit as ik


def bar(**options: Any) -> tuple[ik.callbacks.progress, io.StringIO]:
    out = io.StringIO()
    return ik.callbacks.progress("equilibrium", file=out, mininterval=0, **options), out


def last(out: io.StringIO) -> list[str]:
    """The final state of each bar that was closed."""
    return [line.split("\r")[-1] for line in out.getvalue().split("\n") if line.strip()]


def test_counts_steps_and_shows_the_worst_residual() -> None:
    callback, out = bar()
    with callback:
        solution = ik.fixed_point(torch.cos, torch.zeros(3, 1), solver="picard", batch_dims=1, callback=callback)
    (line,) = last(out)
    assert line.startswith("equilibrium") and f"{int(solution.steps.max())}step" in line
    assert f"worst residual {float(solution.residual_norm.max()):.2e}" in line


def test_one_object_serves_several_solves() -> None:
    callback, out = bar()
    solutions = [ik.fixed_point(torch.cos, torch.zeros(1), solver=s, callback=callback) for s in ("picard", "anderson")]
    callback.close()
    lines = last(out)
    assert len(lines) == 2
    for line, solution in zip(lines, solutions, strict=True):
        assert f"{int(solution.steps)}step" in line


def test_closes_when_collected() -> None:
    callback, out = bar()
    callback(1, None, torch.tensor([0.5, 2.0]))
    assert "\n" not in out.getvalue()
    del callback
    gc.collect()
    assert "worst residual 2.00e+00" in last(out)[0]


def test_nan_is_the_worst_and_an_empty_batch_is_none() -> None:
    callback, out = bar()
    callback(1, None, torch.tensor([1.0, float("nan")]))
    callback(2, None, torch.tensor([]))
    callback.close()
    assert "inf" in out.getvalue() and "0.00e+00" in out.getvalue()


def test_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without_tqdm(name: str, *rest: Any, **more: Any) -> Any:
        if name.startswith("tqdm"):
            raise ImportError(name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without_tqdm)
    with pytest.raises(ImportError, match=r"pip install implicitkit\[progress\]"):
        ik.callbacks.progress()
