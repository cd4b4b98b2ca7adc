"""The code blocks of a page: found, run in order in one namespace, and what they print compared with what the page says.

A script (``.py``) is one block whose output is its own business.

A block fenced with ```python is run.  A block fenced with ```text that follows it directly is what it prints: words must be
equal, whole numbers too, other numbers to their last printed digit or to one per cent (``2.``, as torch prints what is whole
to the last bit, to four digits); ``...`` stands for anything.  A comment that says what a line gives is compared too
(``comments.py``).  Code that is shown and not run (another library's) is fenced with ```{code-block} python.
``plt.show()`` saves the figure into ``docs/pictures``, as ``page_1.png``, ``page_2.png``, and so on, when a page is
written, and asks for it when it is tested.

    python tests/docs/blocks.py docs/tutorials/argmin.md ...     writes outputs and pictures into the pages
"""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import re
import sys
import tempfile
import traceback
import types
import warnings
from dataclasses import dataclass
from multiprocessing import forkserver
from pathlib import Path

from comments import HOOK, hook, hooked

ROOT = Path(__file__).parents[2]
PICTURES = ROOT / "docs" / "pictures"
FENCE = re.compile(r"^( *)```(\{?[\w-]*\}?)[^\n`]*\n(.*?)^\1```[ ]*$", re.M | re.S)
NUMBER = re.compile(r"(?<![\w.])[-+]?\d+(?:\.\d+|\.(?=[\]),]))?(?:e[-+]?\d+)?(?![\w])")


@dataclass
class Block:
    """A block of code, where it begins, and what the page says it prints (``None``: nothing is said)."""

    code: str
    line: int
    end: int
    expected: str | None
    span: tuple[int, int] | None


def blocks(text: str) -> list[Block]:
    """The blocks of a page that are run."""
    fences = list(FENCE.finditer(text))
    found = []
    for i, fence in enumerate(fences):
        if fence[2] != "python":
            continue
        after = fences[i + 1] if i + 1 < len(fences) else None
        told = after if after and after[2] == "text" and not text[fence.end() : after.start()].strip() else None
        margin = len(fence[1])
        code = "\n".join(line[margin:] for line in fence[3].split("\n"))
        expected = told[3] if told else None
        found.append(
            Block(code, text.count("\n", 0, fence.start()) + 2, fence.end(), expected, told.span(3) if told else None)
        )
    return found


def same(printed: str, expected: str) -> bool:
    """Whether a block printed what the page says."""
    parts = [" ".join(part.split()) for part in f" {expected} ".split("...")]
    pattern = ".*?".join(_pattern(part) for part in parts)
    found = re.fullmatch(pattern, " ".join(printed.split()), re.S)
    return found is not None and all(map(_number, found.groups(), NUMBER.findall(" ... ".join(parts))))


def _pattern(part: str) -> str:
    """Words as they are, a group for each number."""
    return r"\s*" + rf"({NUMBER.pattern})".join(map(re.escape, NUMBER.split(part))).replace(r"\ ", r"\s*") + r"\s*"


def _number(got: str, want: str) -> bool:
    if re.fullmatch(r"[-+]?\d+", want):
        return got == want
    mantissa, _, exponent = want.partition("e")
    digits = 4 if mantissa.endswith(".") else len(mantissa.partition(".")[2])
    last = 10.0 ** (int(exponent or 0) - digits)
    return abs(float(got) - float(want)) <= max(1.01 * last, 0.01 * abs(float(want)))


def run(path: str, write: bool = False) -> list[str]:
    """Run a page; return what is wrong with it, or with ``write`` mend the outputs and pictures."""
    page = Path(path)
    text = page.read_text()
    module = types.ModuleType("__main__")  # so that what a page defines can be pickled and inspected
    space = vars(module)
    wrong: list[str] = []
    space[HOOK] = hook(wrong)
    printed: list[tuple[Block, str]] = []
    os.environ["MPLBACKEND"] = "Agg"
    _prepare(page, text, write, wrong)
    sys.modules["__main__"] = module  # the process is the page's own
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        os.chdir(folder)
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message=".torch.jit.script. is deprecated")
        if page.suffix == ".py":
            warnings.simplefilter("ignore", DeprecationWarning)  # NumPy's, of tensors that are given to matplotlib
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor")  # torch.compile looks at it
        for block in [Block(text, 1, 0, "...", None)] if page.suffix == ".py" else blocks(text):
            out = io.StringIO()
            try:
                with contextlib.redirect_stdout(out):
                    exec(hooked(block.code, str(page), block.line)[0], space)
            except BaseException:
                os.chdir(ROOT)
                return [*wrong, f"{page.name}:{block.line}: {traceback.format_exc(limit=-3)}"]
            printed.append((block, out.getvalue()))
        os.chdir(ROOT)
    mended = text
    for block, got in reversed(printed):
        if (block.expected is None and not got) or (block.expected is not None and same(got, block.expected)):
            continue
        wrong.append(f"{page.name}:{block.line}: printed\n{got}\nbut the page says\n{block.expected}")
        if block.span:
            mended = mended[: block.span[0]] + got.rstrip("\n") + "\n" + mended[block.span[1] :]
        else:
            mended = mended[: block.end] + f"\n\n```text\n{got.rstrip()}\n```" + mended[block.end :]
    if write and mended != text:
        page.write_text(mended)
    return wrong


def _prepare(page: Path, text: str, write: bool, wrong: list[str]) -> None:
    """The state every page begins in, and pictures in the place of windows."""
    import torch

    torch.manual_seed(0)
    torch.set_num_threads(1)
    if "pyplot" not in text:
        return
    import matplotlib.pyplot as plt

    sys.path.append(str(ROOT / "docs" / "_ext"))
    import pictures

    pictures.style()
    shown = 0

    def show() -> None:
        nonlocal shown
        shown += 1
        picture = PICTURES / f"{page.stem}_{shown}.png"
        width = pictures.PAGE if page.suffix == ".py" else pictures.COLUMN
        wrong.extend(f"{page.name}, picture {shown}: {fault}" for fault in pictures.faults(plt.gcf(), width))
        if page.suffix == ".py":
            return plt.close("all")
        if write:
            PICTURES.mkdir(exist_ok=True)
            pictures.save(plt.gcf(), picture)
        elif not picture.exists():
            wrong.append(f"{page.name}: docs/pictures/{picture.name} is missing")
        elif pictures.is_stale(plt.gcf(), picture):
            wrong.append(f"{page.name}: docs/pictures/{picture.name} is of other numbers")
        if f"pictures/{picture.name}" not in text:
            wrong.append(f"{page.name}: does not show {picture.name}")
        plt.close("all")

    plt.show = show  # type: ignore[assignment]


def _task(path: str, write: bool, pipe: object) -> None:
    pipe.send(run(path, write))  # type: ignore[attr-defined]


def _context() -> multiprocessing.context.BaseContext:
    """Processes forked from one that has imported ``warm``; that one is started here, where it finds the module."""
    if not hasattr(os, "fork"):
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["warm"])
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *([before] if before else [])])
    try:
        forkserver.ensure_running()
    finally:
        os.environ.pop("PYTHONPATH") if before is None else os.environ.update(PYTHONPATH=before)
    return context


def run_apart(path: str, write: bool = False) -> list[str]:
    """The same in a process of its own (what a page registers is its own)."""
    context = _context()
    ours, theirs = context.Pipe()
    process = context.Process(target=_task, args=(path, write, theirs))
    process.start()
    theirs.close()
    try:
        return ours.recv()
    except EOFError:
        return [f"{path}: the process ended without an answer"]
    finally:
        process.join()


if __name__ == "__main__":
    for name in sys.argv[1:]:
        for fault in run_apart(name, write=True):
            print(fault)
