"""Every public name says what a user must know: equation, shapes, units, errors, source, and an example that runs.

Counted by these definitions, on the docstring of a name and of the public methods that it defines:

equation  a literal or an indented formula with a relation in it (`` = ``, ``<=``, ``->``, ``~``, a minimum or a sum; the
          ``=`` of a keyword is none);
shapes    a tuple of sizes, or words for them (scalar, vector, one a sample, structure of ``z``);
units     the word "units" or "dimensionless";
errors    a section ``Raises`` with the name of an error in it, or "nothing";
source    a work with a name and its year, or "Source:" and where it is from;
example   a heading in ``docs/examples_by_name.md`` whose code uses it, or code in its docstring (both are run).

Shapes, units, errors and source may stand in the contract, the public base class (``ik.Problem``, ``ik.Solver``,
``ik.Rule``, ``ik.LinearSolver``, a projection's, a proximal map's, a cell's): the reference shows whom a class derives from.
The verbs have ``ik.solve`` as their contract, and say so.  What a name need not say is in ``FREE``, with the reason.
"""

from __future__ import annotations

import inspect
import re
import sys
import textwrap
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from blocks import ROOT

import implicitkit as ik
import implicitkit_cvxpy
import implicitkit_deq

sys.path.insert(0, str(ROOT / "docs" / "_ext"))
from docstrings import is_code

INDENTED = re.compile(r"(?:^ {4}.*\n|^ *\n)+", re.M)
CRITERIA = ("equation", "shapes", "units", "errors", "source", "example")
RELATION = re.compile(r"(?<=\s)(?:=|<=|>=|<-|->|~|in)(?=\s)|\barg?min\b|\bsum\b|\|.+\|")
SHAPES = re.compile(
    r"``\(?\*?(batch|B|n|N|k|p|samples|steps|nodes|positions)\b[^`]*``|\(batch|[Ss]hape|scalar|vector|one a sample"
    r"|one per|per sample|pytree|structure of ``z"
)
UNITS = re.compile(r"\b[Uu]nits?\b(?! vectors?)|[Dd]imensionless")
SOURCE = re.compile(
    r"[A-Z][\w'-]+(?:,?\s(?:et\sal\.|&|and|[A-Z][\w'.-]*))*,?\s\(?(?:1[89]|20)\d\d\b"  # Bai, Kolter & Koltun (2019)
    r"|\*[^*]+\*[^.]*(?:ed\.)?[^.]*\b(?:1[89]|20)\d\d\b|Source: *\w{2}"
)
ERRORS = re.compile(r"Raises( \(.*\))?:\s*(nothing\b|what \w+ raises|[^\n]*(Error|Warning|Exception)\b)")

#: why a name need not say something: reason -> (criteria, names)
# fmt: off
FREE: dict[str, tuple[str, str]] = {
    "an error or a warning: its docstring says when; the guide to errors has causes and cures": (
        "equation shapes units errors source",
        "CapabilityError CapturedTensorError ChangedFunctionError ConvergenceError ConvergenceWarning "
        "ImpureFunctionWarning "
        "SparsityWarning UnknownNameError CausalityWarning ForgivenWarning IgnoredInputWarning StabilityWarning "
        "DegenerateError "
        "ProgramError StructurallyZeroGradientWarning ConformanceError",
    ),
    "looks up or registers, computes nothing": (
        "equation shapes units source",
        "get_solver linear_solvers plugins problems rules solvers register_linear_solver register_problem "
        "register_rule "
        "register_solver",
    ),
    "lists names, takes nothing that could be wrong": ("errors", "linear_solvers plugins problems rules solvers"),
    "a container: what fills it says what its fields are, and raises": (
        "equation errors source",
        "Estimate Certificate CurveFit Found LinearSolution Solution Stability Stage Status ConeSolution Factor Settings "
        "Check CheckResult "
        "ConformanceReport Known SolverCheck Equality Inequality Operator BlockStructure",
    ),
    "names, numbers and reports without a unit of their own": (
        "units shapes",
        "Estimate Status Settings Stage Found Check CheckResult ConformanceReport Known SolverCheck BlockStructure Monitor "
        "TensorBoard "
        "Pretraining merge tie free_weights load_torchdeq check_linear_solver check_rule check_solver known_problems "
        "parametrize_with_checks progress Factor "
        "Equality Inequality",
    ),
    "a tool around a computation, not a computation": (
        "equation source",
        "check_linear_solver check_rule check_solver known_problems parametrize_with_checks progress "
        "Monitor TensorBoard Pretraining free_weights load_torchdeq "
        "TorchOptim Wrapped",
    ),
    "takes nothing that could be wrong": (
        "errors",
        "free_weights known_problems Projection Prox LinearSolver tie_weights CHECKS",
    ),
    "a contract of this library: what fulfils it names its source": (
        "source",
        "LinearSolver Method Problem Rule Solver Cell",
    ),
    "a table for those who write checks": ("equation shapes units errors source", "CHECKS"),
}
# fmt: on


def free(name: str, criterion: str) -> bool:
    return any(name in names.split() and criterion in criteria.split() for criteria, names in FREE.values())


def examples() -> dict[str, str]:
    """Name -> the code under its heading."""
    sections = (ROOT / "docs" / "examples_by_name.md").read_text().split("\n## ")[1:]
    found = {}
    for section in sections:
        heading, _, body = section.partition("\n")
        for name in heading.split(","):
            found[name.strip()] = "\n".join(re.findall(r"```python\n(.*?)```", body, re.S))
    return found


EXAMPLES = examples()


def public() -> dict[str, Any]:
    """Full name -> object, each object once; of the names for authors of parts those that have an example."""
    found: dict[str, Any] = {name: getattr(ik.extend, name[10:]) for name in EXAMPLES if name.startswith("ik.extend.")}
    inner = ("linear", "manifold", "project", "prox", "relax", "testing", "callbacks")
    places = [("ik", ik), *((f"ik.{name}", getattr(ik, name)) for name in inner)]
    places += [("implicitkit_deq", implicitkit_deq), ("implicitkit_cvxpy", implicitkit_cvxpy)]
    places += [("implicitkit_deq.cells", implicitkit_deq.cells)]
    for place, module in places:
        for name in module.__all__:
            part = getattr(module, name)
            if not isinstance(part, ModuleType) and not any(part is other for other in found.values()):
                found[f"{place}.{name}"] = part
    return found


NAMES = public()
CONTRACTS = (
    ik.Problem,
    ik.Solver,
    ik.Rule,
    ik.LinearSolver,
    ik.project.Projection,
    ik.prox.Prox,
    implicitkit_deq.Cell,
    ik.manifold.Manifold,
)


def told(part: Any) -> str:
    """The docstring of a name, and of the public methods that it defines."""
    text = inspect.cleandoc(part.__doc__ or "") if not isinstance(part, (dict, tuple, str)) else ""
    if inspect.isclass(part):
        members = [m for n, m in vars(part).items() if not n.startswith("_") or n == "__call__"]
        text += "\n".join(inspect.getdoc(m) or "" for m in members if inspect.isfunction(m) or isinstance(m, property))
    return text


def contract(part: Any) -> str:
    """What a name inherits: the docstrings of its public bases, for a verb that of ``ik.solve``."""
    if inspect.isclass(part):
        return "\n".join(told(base) for base in part.__mro__[1:] if base in CONTRACTS or base is ik.Method)
    if re.search(r"\bsolve\(|ik\.solve|implicitkit\.solve`", part.__doc__ or ""):
        return told(ik.solve)
    return ""


def formulas(text: str) -> list[str]:
    blocks = [textwrap.dedent(block).strip("\n") for block in INDENTED.findall(text + "\n")]
    return [*re.findall(r"``(.+?)``", text, re.S), *(block for block in blocks if block and not is_code(block))]


def says(full: str, criterion: str) -> bool:
    """Whether a name says it, or need not."""
    name, part = full.rpartition(".")[2], NAMES[full]
    if free(name, criterion):
        return True
    own = told(part)
    if criterion == "equation":
        return any(RELATION.search(formula) for formula in formulas(own))
    if criterion == "example":
        in_docstring = any(is_code(textwrap.dedent(b).strip("\n")) for b in INDENTED.findall(own + "\n") if b.strip())
        return in_docstring or re.search(rf"\b{name}\b", EXAMPLES.get(full, "")) is not None
    text = own + "\n" + contract(part)
    pattern = {"shapes": SHAPES, "units": UNITS, "source": SOURCE, "errors": ERRORS}[criterion]
    return pattern.search(text) is not None


def missing(criterion: str) -> list[str]:
    return [name for name in NAMES if not says(name, criterion)]


@pytest.mark.parametrize("criterion", CRITERIA)
def test_every_public_name_says_it(criterion: str) -> None:
    assert missing(criterion) == []


def test_a_name_that_says_nothing_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    class Silent:
        """Something."""

    class Empty:
        """Something, since 2026; ``ik.Empty(number=3)``.

        Raises:

        Source:

        Args:
            number: a number.
        """

    for part in (Silent, Empty):
        monkeypatch.setitem(NAMES, "ik.Silent", part)
        assert [c for c in CRITERIA if not says("ik.Silent", c)] == list(CRITERIA)


def test_every_heading_of_the_examples_is_a_public_name() -> None:
    assert [name for name in EXAMPLES if name not in NAMES] == []


def test_nothing_is_free_of_what_is_gone() -> None:
    there = {name.rpartition(".")[2] for name in NAMES}
    assert {name for _, names in FREE.values() for name in names.split()} - there == set()


def test_reference_shows_bases() -> None:
    assert ":show-inheritance:" in Path(ROOT / "docs" / "_ext" / "api_pages.py").read_text()


if __name__ == "__main__":
    for criterion in CRITERIA:
        lacking = missing(criterion)
        print(f"{criterion:9} {len(NAMES) - len(lacking):4} of {len(NAMES)}; missing: {' '.join(lacking)}")
