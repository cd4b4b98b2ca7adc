"""Every application of the gallery runs, is short, checks itself by independent means, and draws one picture."""

from __future__ import annotations

import ast
import re
import sys
import warnings
from pathlib import Path

import pytest
import torch
from blocks import ROOT, run_apart

import implicitkit as ik
import implicitkit_deq

sys.path.insert(0, str(ROOT / "docs" / "_ext"))
import fresh

GALLERY = sorted((ROOT / "examples" / "gallery").glob("*.py"))
SLOW = {
    "bundle_adjustment", "dataset_distillation", "hyperparameters", "implicit_maml", "implicit_representation",
    "monotone_deq", "mpc", "optical_flow", "planning", "pose_graph", "portfolio", "sudoku", "supply_chain",
    "universal_transformer",
}  # fmt: skip


@pytest.mark.parametrize(
    "path", [pytest.param(p, marks=[pytest.mark.slow] * (p.stem in SLOW), id=p.stem) for p in GALLERY]
)
def test_an_application_runs(path: Path) -> None:
    assert run_apart(str(path)) == []


@pytest.mark.parametrize("path", GALLERY, ids=lambda path: path.stem)
def test_an_application_keeps_to_the_form(path: Path) -> None:
    source = path.read_text()
    tree = ast.parse(source)
    text = ast.get_docstring(tree) or ""
    assert source.count("\n") < 150
    assert sum(isinstance(node, ast.Assert) for node in ast.walk(tree)) >= 2, "an independent check, asserted"
    assert "*Checked:*" in text, "the docstring says what is checked, and against what"
    assert source.count("plt.show()") == 1
    assert text.splitlines()[1] == "=" * len(text.splitlines()[0]), "a title, underlined"


def test_the_site_is_not_built_of_an_application_that_warns() -> None:
    """Its builder shows what an application warns of, below its output, and goes on."""
    told = re.search(r'"reset_modules": \((.*)\)', (ROOT / "docs" / "conf.py").read_text())
    assert told is not None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in re.findall(r'"fresh\.(\w+)"', told[1]):
            if name != "colours":
                getattr(fresh, name)({}, "an_application")
        with pytest.raises(ik.ConvergenceWarning):
            ik.fixed_point(lambda z: 2 * z, torch.ones(3), solver="picard", max_steps=3, on_failure="warn")
        with pytest.raises(implicitkit_deq.ForgivenWarning):
            warnings.warn("forgiven", implicitkit_deq.ForgivenWarning, stacklevel=1)
        warnings.warn("somebody else's", UserWarning, stacklevel=1)
