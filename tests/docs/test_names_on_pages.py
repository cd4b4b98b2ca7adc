"""Names that pages mention exist, and tables that should be complete are."""

from __future__ import annotations

import re

import pytest
from blocks import ROOT
from test_spelling_and_links import PAGES

import implicitkit as ik

SCIPY = re.compile(r"\"(scipy\.\w+\.[\w-]+)\"")


def test_every_solver_of_scipy_that_a_page_names_is_registered() -> None:
    named = {(page.name, name) for page in PAGES for name in SCIPY.findall(page.read_text())}
    assert len(named) > 5
    known = set(ik.solvers())
    assert {(page, name) for page, name in named if name not in known} == set()


@pytest.mark.parametrize("status", list(ik.Status), ids=lambda status: status.name)
def test_the_page_of_errors_explains_every_status(status: ik.Status) -> None:
    table = (ROOT / "docs" / "howto" / "errors.md").read_text()
    (row,) = re.findall(rf"^\| `{status.name}` \|(.*)\|$", table, re.M)
    assert len(row.split("|")[0].strip()) > 5
