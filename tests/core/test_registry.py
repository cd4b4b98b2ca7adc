"""The registry: names and suggestions, what serves what, options, plugins found by entry point."""

from __future__ import annotations

import builtins
import sys
import textwrap
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch

import implicitkit as ik
from implicitkit.linear.catalogue import get_linear_solver
from implicitkit.problem.catalogue import get_problem_entry
from implicitkit.registry import plugins
from implicitkit.registry.plugins import PluginWarning
from implicitkit.registry.table import TABLES, describe
from implicitkit.rule.catalogue import get_rule
from implicitkit.solver.catalogue import get_solver, serves


@pytest.fixture(autouse=True)
def _own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test registers into a copy of the real tables, and sees no plugins but its own."""
    ik.plugins()  # those that are installed register once, here at the latest
    for table in TABLES.values():
        ours = {n: e for n, e in table.entries.items() if str(e.target.__module__).startswith("implicitkit.")}
        monkeypatch.setattr(table, "entries", ours)
    monkeypatch.setattr(plugins, "_plugins", {})
    monkeypatch.setattr(plugins, "_scanned", True)


def black_box(f: Any, z0: Any, *, rtol: float, atol: float, max_steps: int, inner: int = 3) -> Any:
    """Return the start."""
    return z0


class Plain(ik.Method):
    """The plain iteration."""

    def step(self, f: Any, z: Any, state: Any) -> Any:
        return f(z), state


# -------------------------------------------------------------------------------------------------------------- names
LOOKUPS = {
    "solver": (get_solver, "newton_krilov", "unknown solver 'newton_krilov'. Did you mean 'newton_krylov'?"),
    "hyphen": (get_solver, "newton-krylov", "Did you mean 'newton_krylov'?"),
    "capitals": (get_solver, "Anderson", "Did you mean 'anderson'?"),
    "rule": (get_rule, "implict", "unknown rule 'implict'. Did you mean 'implicit'?"),
    "linear solver": (get_linear_solver, "gmress", "unknown linear solver 'gmress'. Did you mean 'gmres'?"),
    "problem": (get_problem_entry, "fixpoint", "unknown problem 'fixpoint'. Did you mean 'fixed_point'?"),
    "other noun": (get_solver, "gmres", "(There is a linear solver of that name.)"),
}


@pytest.mark.parametrize(("look_up", "name", "said"), LOOKUPS.values(), ids=LOOKUPS)
def test_unknown_name_is_answered_with_the_nearest(look_up: Callable[[str], Any], name: str, said: str) -> None:
    with pytest.raises(ik.UnknownNameError) as caught:
        look_up(name)
    assert said in str(caught.value)
    assert isinstance(caught.value, ValueError)


def test_unknown_name_without_a_near_one_says_how_to_list_all() -> None:
    with pytest.raises(ik.UnknownNameError, match=r"Registered solvers: aitken, anderson, .* and \d+ more") as caught:
        get_solver("zzz")
    assert "Did you mean" not in str(caught.value)
    assert f"and {len(ik.solvers()) - 5} more" in str(caught.value)


@pytest.mark.parametrize("verb", ["solver", "rule"])
def test_solve_passes_the_suggestion_on(verb: str) -> None:
    near = {"solver": "andersen", "rule": "one_stop"}[verb]
    with pytest.raises(ik.UnknownNameError, match="Did you mean"):
        ik.fixed_point(torch.cos, torch.zeros(2), **{verb: near})


@pytest.mark.parametrize("name", ["", " ", "two words", "1st", "dot.", None, 3])
def test_malformed_names_are_refused(name: Any) -> None:
    with pytest.raises(ValueError, match="a name is a non-empty string"):
        ik.register_solver(name, solves="root")


def test_dotted_names_are_allowed() -> None:
    ik.register_solver("scipy.root.test", solves="root")(black_box)
    assert get_solver("scipy.root.test").name == "scipy.root.test"


# -------------------------------------------------------------------------------------------------------- registering
def test_class_is_returned_unchanged_with_its_name() -> None:
    @ik.register_solver("mine", solves="fixed_point")
    @dataclass(frozen=True)
    class Mine(Plain):
        """Mine."""

        weight: float = 1.0

    assert (Mine.name, Mine.solves) == ("mine", "fixed_point")
    assert get_solver("mine") == Mine()
    assert get_solver("mine", weight=0.5) == get_solver(Mine, weight=0.5) == Mine(0.5)
    assert "mine" in ik.solvers()


def test_function_becomes_a_black_box() -> None:
    assert ik.register_solver("box", solves="root", batch="joint")(black_box) is black_box
    solver = get_solver("box", inner=5)
    assert isinstance(solver, ik.extend.BlackBox)
    assert (solver.name, solver.solves, solver.batch, solver.options) == ("box", "root", "joint", (("inner", 5),))
    assert get_solver(black_box) == get_solver("box")


def test_objects_pass_through() -> None:
    solver, rule, linear_solver = ik.Anderson(memory=2), ik.Implicit(rtol=1e-3), ik.linear.LU()
    assert get_solver(solver) is solver
    assert get_rule(rule) is rule
    assert get_linear_solver(linear_solver) is linear_solver


def test_duplicates_are_refused_unless_overridden() -> None:
    with pytest.raises(
        ValueError, match=r"'anderson' is already registered, by implicitkit\.solver\.fixed_point\.anderson\.Anderson"
    ):
        ik.register_solver("anderson", solves="fixed_point")(Plain)
    assert isinstance(get_solver("anderson"), ik.Anderson)
    ik.register_solver("anderson", solves="fixed_point", override=True)(Plain)
    assert isinstance(get_solver("anderson"), Plain)


def test_the_same_definition_may_run_again() -> None:
    """A notebook cell executed twice, a module reloaded."""

    def cell() -> type:
        space: dict[str, Any] = {"__name__": "__main__", "Method": ik.Method}
        exec("class Again(Method):\n    def step(self, f, z, state): ...", space)
        return space["Again"]

    first, second = cell(), cell()
    ik.register_solver("again", solves="root")(first)
    ik.register_solver("again", solves="root")(second)
    assert type(get_solver("again")) is second


def _no_tolerances(f: Any, z0: Any) -> Any: ...
def _no_max_steps(f: Any, z0: Any, *, rtol: float, atol: float) -> Any: ...
def _no_start(f: Any, *, rtol: float, atol: float, max_steps: int) -> Any: ...
def _one_more(f: Any, z0: Any, more: int, *, rtol: float, atol: float, max_steps: int) -> Any: ...


class _NoStep(ik.Method):
    """Defines a step of another name."""

    def stepp(self, f: Any, z: Any, state: Any) -> Any: ...


class _Stateless(ik.Method):
    def step(self, f: Any, z: Any) -> Any: ...  # type: ignore[override]


class _InitOfZ(Plain):
    def init(self, z: Any) -> Any: ...  # type: ignore[override]


class _NoRun(ik.extend.Solver):
    """Runs nothing."""


BAD_TARGETS = {
    "method without step": (_NoStep, {}, "_NoStep, solver 'bad', must define step(f, z, state); it does not"),
    "step without state": (_Stateless, {}, "must define step(f, z, state); such a call fails: too many positional"),
    "init without f": (_InitOfZ, {}, "must define init(f, z); such a call fails: too many positional"),
    "solver without run": (_NoRun, {}, "_NoRun, solver 'bad', must define run(f, z0, options); it does not"),
    "no tolerances": (_no_tolerances, {}, "it does not accept rtol, atol, max_steps"),
    "no max_steps": (_no_max_steps, {}, "it does not accept max_steps"),
    "no start": (_no_start, {}, "too many positional arguments"),
    "one argument more": (_one_more, {}, "missing a required argument: 'more'"),
    "not callable": (3, {}, "got 3 (an int)"),
    "other class": (dict, {}, "must be a subclass of implicitkit.Method"),
    "batch of a method": (Plain, {"batch": "native"}, "batch= is for functions"),
}


@pytest.mark.parametrize(("target", "options", "said"), BAD_TARGETS.values(), ids=BAD_TARGETS)
def test_bad_targets_are_refused(target: Any, options: dict[str, Any], said: str) -> None:
    with pytest.raises(TypeError) as caught:
        ik.register_solver("bad", solves="root", **options)(target)
    assert said in str(caught.value)
    assert "bad" not in ik.solvers()


def test_any_keyword_will_do() -> None:
    def relaxed(f: Any, z0: Any, **options: Any) -> Any:
        return z0

    ik.register_solver("relaxed", solves="root")(relaxed)
    assert get_solver("relaxed", whatever=1).options == (("whatever", 1),)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"solves": "minimize"}, "Did you mean 'minimise'?"),
        ({"solves": "argmin"}, "solved by solves='minimise'"),
        ({"solves": "root", "batch": "loops"}, "Did you mean 'loop'?"),
    ],
)
def test_bad_choices_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError) as caught:
        ik.register_solver("bad", **options)
    assert said in str(caught.value)


def test_the_name_of_the_librarys_own_choice_is_taken() -> None:
    with pytest.raises(ValueError, match="'auto' is taken"):
        ik.register_solver("auto", solves="root")


OPTION_ERRORS = {
    "method": (lambda: get_solver("anderson", memori=3), "'anderson' has no option 'memori'. Did you mean 'memory'?"),
    "class": (lambda: get_solver(ik.Anderson, memori=3), "'Anderson' has no option 'memori'"),
    "rule": (lambda: get_rule("implicit", rtoll=1), "Did you mean 'rtol'?"),
    "linear solver": (lambda: get_linear_solver("gmres", restarts=1), "Did you mean 'restart'?"),
    "configured": (lambda: get_solver(ik.Anderson(), memory=3), "is configured already"),
    "number": (lambda: get_solver(3), "solver must be a registered name, a configured object"),
    "none": (lambda: get_rule(None), "rule must be a registered name or a configured object"),
    "function": (lambda: get_solver(black_box), "the function black_box is not registered as a solver"),
    "unregistered class": (lambda: get_solver(Plain), "does not say what it solves"),
    "unregistered method": (lambda: get_solver(Plain()), "does not say what it solves"),
    "function as linear solver": (lambda: get_linear_solver(black_box), "linear_solver must be a registered name"),
    "no problem": (lambda: get_problem_entry(3), "int is not a problem"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize(("call", "said"), OPTION_ERRORS.values(), ids=OPTION_ERRORS)
def test_bad_choices_of_parts(monkeypatch: pytest.MonkeyPatch, call: Callable[[], Any], said: str) -> None:
    monkeypatch.setattr(Plain, "solves", "")
    with pytest.raises(TypeError) as caught:
        call()
    assert said in str(caught.value)


def test_problem_entries() -> None:
    @dataclass(frozen=True)
    class EnergyBalance(ik.Problem):
        """Inflow equals loss."""

        def residual(self, z: Any, inflow: Any) -> Any:
            return inflow - z**2

    assert get_problem_entry(EnergyBalance()).name == "root"  # by its kind
    assert ik.register_problem(EnergyBalance, linear_solver="lsmr") is EnergyBalance
    entry = get_problem_entry(EnergyBalance())
    assert (entry.name, entry.rule, entry.linear_solver) == ("energy_balance", "implicit", "lsmr")

    class Narrower(EnergyBalance):
        """Takes its parent's entry."""

    assert get_problem_entry(Narrower) == entry
    assert get_problem_entry(ik.FixedPoint(torch.cos)).name == "fixed_point"


# --------------------------------------------------------------------------------------------------------- capability
SERVES = {
    "root": {"root", "fixed_point", "steady_state", "argmin", "least_squares"},
    "fixed_point": {"fixed_point"},
    "minimise": {"argmin", "least_squares", "root", "fixed_point", "steady_state"},
    "least_squares": {"least_squares", "root", "fixed_point", "steady_state"},
    "steady_state": {"steady_state"},
}


@pytest.mark.parametrize("solves", SERVES)
def test_serves(solves: str) -> None:
    kinds = ("root", "fixed_point", "argmin", "least_squares", "steady_state")
    assert {kind for kind in kinds if serves(solves, kind)} == SERVES[solves]


def test_a_solver_that_does_not_fit_is_refused_with_those_that_do() -> None:
    with pytest.raises(ik.CapabilityError) as caught:
        ik.root(lambda z: z**2 - 2, torch.ones(1), solver="picard")
    text = str(caught.value)
    assert "solver 'picard' (solves='fixed_point')" in text
    assert "Root is of kind 'root'" in text
    fitting = text.partition("Solvers that fit: ")[2].rstrip(".").split(", ")
    assert "newton" in fitting and "anderson" not in fitting


# ------------------------------------------------------------------------------------------------------------ listing
def test_lists_are_sorted_names_and_not_the_folders_of_the_same_name() -> None:
    for listing in (ik.solvers, ik.problems, ik.rules, ik.linear_solvers):
        names = listing()
        assert names == sorted(names) and all(isinstance(name, str) for name in names)
    assert {"anderson", "newton", "newton_krylov"} <= set(ik.solvers())
    assert {"implicit", "one_step"} <= set(ik.rules())


def test_every_built_in_part_is_described() -> None:
    for kind in ("solvers", "problems", "rules", "linear-solvers"):
        for entry in describe(kind):
            assert 0 < len(entry.doc) <= 200, f"{kind}: {entry.name} is said in {len(entry.doc)} letters"
            assert entry.origin in ("implicitkit", "implicitkit_cvxpy", "implicitkit_deq")  # plugins: once loaded
    with pytest.raises(ValueError, match="Did you mean 'solvers'"):
        describe("solver")


def test_a_generated_docstring_is_no_description() -> None:
    @ik.register_solver("silent", solves="root")
    @dataclass(frozen=True)
    class Silent(Plain):
        weight: float = 1.0

    (entry,) = (e for e in describe("solvers") if e.name == "silent")
    assert entry.doc == "" and entry.options == {"weight": 1.0}


# ------------------------------------------------------------------------------------------------------------ plugins
class Site:
    """A folder of fake distributions on ``sys.path``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def add(self, distribution: str, version: str, modules: dict[str, str], points: dict[str, str]) -> None:
        """Lay down the modules, and metadata that names the entry points."""
        for name, code in modules.items():
            (self.folder / f"{name}.py").write_text("import implicitkit as ik\n" + textwrap.dedent(code))
        info = self.folder / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
        lines = "".join(f"{name} = {value}\n" for name, value in points.items())
        (info / "entry_points.txt").write_text(f"[{plugins.GROUP}]\n{lines}")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Fake distributions, unknown to the registry until the first unknown name or listing."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def entry_points() -> Any:
        for dist in metadata.distributions(path=[str(tmp_path)]):
            for point in dist.entry_points.select(group=plugins.GROUP):
                yield (dist.name, dist.version, point.name, point.value), point

    monkeypatch.setattr(plugins, "_entry_points", entry_points)
    monkeypatch.setattr(plugins, "_scanned", False)
    before = set(sys.modules)
    yield Site(tmp_path)
    for name in set(sys.modules) - before:
        if getattr(sys.modules[name], "__file__", None) and str(tmp_path) in str(sys.modules[name].__file__):
            del sys.modules[name]


SOLVER = """
    @ik.register_solver("{name}", solves="fixed_point")
    class {cls}(ik.Method):
        "A plugin's solver."
        def step(self, f, z, state):
            return f(z), state
"""


@pytest.mark.filterwarnings("ignore:plugins that failed to load")
def test_what_a_plugin_sets_while_it_loads_is_undone(site: Site) -> None:
    """A look-up of a name changes no later result: the defaults of torch are as they were, also if the plugin fails."""
    sets = """
        import torch
        torch.set_default_dtype(torch.float16)
        torch.set_default_device("meta")
        torch.set_grad_enabled(False)
        torch.use_deterministic_algorithms(True)
        torch.set_num_threads(torch.get_num_threads() + 1)
    """
    site.add("setting", "1.0", {"setting": sets}, {"setting": "setting"})
    site.add("failing", "1.0", {"failing_setting": sets + "    raise ValueError\n"}, {"failing": "failing_setting"})

    def defaults() -> tuple[Any, ...]:
        of_threads = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
        return (torch.get_default_dtype(), torch.get_default_device(), torch.is_grad_enabled(), *of_threads)

    before = defaults()
    try:
        assert {p.loaded for p in ik.plugins() if p.name in ("setting", "failing")} == {True, False}
        assert defaults() == before
    finally:
        torch.set_default_dtype(before[0])
        torch.set_default_device(None)
        torch.set_grad_enabled(True)
        torch.use_deterministic_algorithms(False)


def test_an_interrupt_while_plugins_load_loses_none(site: Site) -> None:
    """Ctrl-C in the import of one plugin: the next look-up loads it, and those after it."""
    once = """
        if not getattr(__import__("builtins"), "_interrupted_once", False):
            __import__("builtins")._interrupted_once = True
            raise KeyboardInterrupt
    """
    for name in ("first", "second"):
        code = textwrap.dedent(once) + textwrap.dedent(SOLVER.format(name=name, cls=name.title()))
        site.add(f"{name}-solvers", "1.0", {f"{name}_solvers": code}, {name: f"{name}_solvers"})
    try:
        with pytest.raises(KeyboardInterrupt):
            ik.solvers()
        assert {"first", "second"} <= set(ik.solvers())
        assert [(p.name, p.loaded) for p in sorted(ik.plugins(), key=str)] == [("first", True), ("second", True)]
    finally:
        del builtins._interrupted_once  # type: ignore[attr-defined]


def test_plugin_is_found_at_the_first_unknown_name(site: Site) -> None:
    site.add("foo-solvers", "0.2", {"foo_solvers": SOLVER.format(name="foo", cls="Foo")}, {"foo": "foo_solvers"})
    assert isinstance(get_solver("anderson"), ik.Anderson)
    assert "foo_solvers" not in sys.modules  # a known name loads nothing
    solution = ik.fixed_point(torch.cos, torch.zeros(2), solver="foo")
    assert bool(solution.converged)
    (plugin,) = ik.plugins()
    assert (plugin.name, plugin.distribution, plugin.version, plugin.module, plugin.loaded, plugin.error) == (
        "foo", "foo-solvers", "0.2", "foo_solvers", True, "",
    )  # fmt: skip
    (entry,) = (e for e in describe("solvers") if e.name == "foo")
    assert entry.origin == "foo-solvers" and entry.doc == "A plugin's solver."


def test_plugin_is_found_by_listing(site: Site) -> None:
    site.add("foo-solvers", "0.2", {"foo_listed": SOLVER.format(name="foo", cls="Foo")}, {"foo": "foo_listed"})
    assert "foo" in ik.solvers()


def test_entry_point_may_name_a_function(site: Site) -> None:
    code = f"def setup():\n{textwrap.indent(textwrap.dedent(SOLVER.format(name='bar', cls='Bar')), '    ')}"
    site.add("bar-solvers", "1", {"bar_solvers": code}, {"bar": "bar_solvers:setup"})
    assert "bar" in ik.solvers()
    assert all(plugin.loaded for plugin in plugins.plugins())


BROKEN = {
    "missing module": ({}, "bad_absent", "ModuleNotFoundError: No module named 'bad_absent'"),
    "raises": ({"bad_raises": "raise RuntimeError('out of\\n luck')"}, "bad_raises", "RuntimeError: out of luck"),
    "exits": ({"bad_exits": "raise SystemExit(3)"}, "bad_exits", "SystemExit: 3"),
    "syntax": ({"bad_syntax": "def"}, "bad_syntax", "SyntaxError"),
    "duplicate": (
        {"bad_takes": SOLVER.format(name="anderson", cls="Taken")},
        "bad_takes",
        "ValueError: solver 'anderson' is already registered",
    ),
    "override": (
        {"bad_over": SOLVER.format(name="anderson", cls="Over").replace('point"', 'point", override=True')},
        "bad_over",
        "a plugin cannot replace it",
    ),
}


@pytest.mark.parametrize(("modules", "module", "said"), BROKEN.values(), ids=BROKEN)
def test_broken_plugin_is_reported_and_stops_nobody_else(
    site: Site, modules: dict[str, str], module: str, said: str
) -> None:
    site.add("a-bad-one", "0.3", modules, {"bad": module})
    site.add("foo-solvers", "0.2", {"foo_beside": SOLVER.format(name="foo", cls="Foo")}, {"foo": "foo_beside"})
    with pytest.warns(PluginWarning) as warned:
        assert "foo" in ik.solvers()
    assert len(warned) == 1
    assert "a-bad-one 0.3" in str(warned[0].message) and said in str(warned[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # said once, not again
        bad, good = ik.plugins()
        assert isinstance(get_solver("anderson"), ik.Anderson)
        with pytest.raises(ik.UnknownNameError, match=r"Plugins that failed to load: a-bad-one 0\.3 \("):
            get_solver("nobody")
    assert not bad.loaded and said in bad.error and good.loaded


def test_a_warning_that_is_an_error_leaves_the_registry_in_order(site: Site) -> None:
    site.add("a-bad-one", "0.3", {}, {"bad": "bad_nowhere"})
    site.add("foo-solvers", "0.2", {"foo_after": SOLVER.format(name="foo", cls="Foo")}, {"foo": "foo_after"})
    with pytest.raises(PluginWarning):
        ik.solvers()
    assert "foo" in ik.solvers()


def test_a_plugin_may_look_names_up_while_it_loads(site: Site) -> None:
    code = (
        SOLVER.format(name="asks", cls="Asks") + "\n    assert 'asks' in ik.solvers()\n    assert ik.plugins() == []\n"
    )
    site.add("asking", "1", {"asking": code}, {"asking": "asking"})
    assert [plugin.error for plugin in ik.plugins()] == [""]


def test_threads_see_a_plugin_only_when_it_is_complete(site: Site) -> None:
    code = "    import time\n    time.sleep(0.2)\n" + SOLVER.format(name="slow_one", cls="Slow")
    site.add("slow-one", "1", {"slow_one": code}, {"slow": "slow_one"})
    found: list[str] = []
    threads = [threading.Thread(target=lambda: found.append(get_solver("slow_one").name)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == ["slow_one"] * 4
