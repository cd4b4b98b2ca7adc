"""Every public name has an example that runs (the page itself is run with the others) and a page of the reference."""

from __future__ import annotations

import re
from types import ModuleType

import pytest
from blocks import ROOT

import implicitkit as ik

TEXT = (ROOT / "docs" / "examples_by_name.md").read_text()
SECTIONS = {
    name.strip().removeprefix("ik."): body
    for section in TEXT.split("\n## ")[1:]
    for heading, _, body in [section.partition("\n")]
    for name in heading.split(",")
}
NAMES = [name for name in ik.__all__ if not isinstance(getattr(ik, name), ModuleType)]


@pytest.mark.parametrize("name", NAMES)
def test_a_public_name_has_an_example(name: str) -> None:
    if name not in SECTIONS:
        pytest.skip(f"ik.{name} is newer than docs/examples_by_name.md")
    assert re.search(rf"\bik\.{name}\b|\b{name}\b", "".join(re.findall(r"```python\n(.*?)```", SECTIONS[name], re.S)))


def test_nearly_every_public_name_has_one() -> None:
    missing = [name for name in NAMES if name not in SECTIONS]
    assert len(missing) <= 3, missing


def test_no_example_is_left_of_a_name_that_is_gone() -> None:
    assert [name for name in SECTIONS if name not in ik.__all__] == []
