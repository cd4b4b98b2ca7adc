"""Links of the pages lead somewhere, and words that are often misspelt are spelt right, in British English.

Links within the repository must exist, with their headings, before a build too (a page that is made is linked as its source,
``docs/_ext/page_lists.py``); addresses outside are looked at for their form only, since tests
run offline.  The words are those below; `make docs` asks codespell for its longer list.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from urllib.parse import urlparse

import pytest
from blocks import ROOT

sys.path.insert(0, str(ROOT / "docs" / "_ext"))
from made_pages import MADE

PAGES = sorted(
    path
    for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")]
    if not MADE & set(path.relative_to(ROOT / "docs").parts if "docs" in path.parts[len(ROOT.parts) :] else ())
)
SOURCES = sorted(
    path
    for folder in ("implicitkit", "plugins", "examples", "benchmarks", "docs/_ext", "tests")
    for path in (ROOT / folder).rglob("*.py")
    if path != Path(__file__)
)
LINK = re.compile(r"(?<!\\)\]\(([^()\s]+(?:\([^()\s]*\))?[^()\s]*)\)")
WRONG = re.compile(
    r"\b(teh|recieve|recieved|seperate|seperately|occured|occurence|wich|thier|definately|neccessary|accomodate|acheive|"
    r"arguement|begining|beleive|calender|commited|concensus|dependant on|existance|independant|lenght|heigth|"
    r"maintainance|occassion|paramter|paramters|persistant|posible|preceed|priviledge|publically|refered|relevent|"
    r"succesful|successfull|supress|tolarance|untill|weigth|convergance|derivitive|jacobain|langrangian|lagrangean|"
    r"eigen value|eigen vector|optimization problem is|behavior|neighbor|neighbors|favorite|catalog of|"
    r"analyze|analyzed|minimise[sd]? the the|the the|of of|is is|in in|that that that)\b",
    re.I,
)
QUOTED = re.compile(r"``[^`]*``|`[^`]*`|\"[^\"]*\"|\bbehavior=|https?://\S+")


def anchors(path: Path) -> set[str]:
    """What headings of a page can be linked as."""
    found = set()
    for heading in re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", path.read_text(), flags=re.S), re.M):
        plain = re.sub(r"[^\w\- ]", "", re.sub(r"[`*$\\{}]", "", heading).lower())
        found.add(plain.strip().replace(" ", "-"))
    return found


def broken(page: Path) -> list[str]:
    """The links of a page that lead nowhere."""
    found = []
    for target in LINK.findall(re.sub(r"```.*?```", "", page.read_text(), flags=re.S)):
        if re.match(r"[a-z]+:", target):
            address = urlparse(target)
            host = re.fullmatch(r"[\w-]+(\.[\w-]+)+", address.netloc)
            if address.scheme != "mailto" and (address.scheme not in ("http", "https") or not host):
                found.append(target)
            continue
        name, _, anchor = target.partition("#")
        place = (page.parent / name) if name else page
        here = next((p for p in (place, place.with_suffix(".md")) if p.exists()), None)
        if here is None or (anchor and here.suffix == ".md" and anchor not in anchors(here)):
            found.append(target)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    assert broken(page) == []


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# One\n[a](nowhere.md) [b](#two) [c](#one) [d](http://x) [e](https://example.org/a_(b))\n")
    assert broken(page) == ["nowhere.md", "#two", "http://x"]


def misspelt(text: str) -> list[str]:
    return [found[0] for line in text.splitlines() for found in WRONG.finditer(QUOTED.sub("", line))]


def test_words_are_spelt_right() -> None:
    found = {path.relative_to(ROOT).as_posix(): words for path in PAGES if (words := misspelt(path.read_text()))}
    for path in SOURCES:
        prose = path.read_text()
        comments = "\n".join(re.findall(r"#(.*)$", prose, re.M) + re.findall(r'"""(.*?)"""', prose, re.S))
        if words := misspelt(comments):
            found[path.relative_to(ROOT).as_posix()] = words
    assert found == {}


def test_a_misspelt_word_is_found() -> None:
    assert misspelt("It did not recieve the the gradient; `behavior` is theirs.") == ["recieve", "the the"]
