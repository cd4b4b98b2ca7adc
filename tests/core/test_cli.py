"""``python -m implicitkit``: tables, JSON, exit codes."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import implicitkit as ik
from implicitkit.cli import doctor
from implicitkit.cli.commands import main
from implicitkit.registry import plugins
from implicitkit.registry.plugins import PluginInfo
from implicitkit.registry.table import TABLES

GOOD = PluginInfo("good", "good-parts", "1.0", "good_parts", True)
BAD = PluginInfo("bad", "bad-parts", "0.1", "bad_parts", False, "ImportError: no luck")


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """An installation with one working and one broken plugin."""
    monkeypatch.setattr(plugins, "_scanned", True)
    monkeypatch.setattr(plugins, "_plugins", {("g", "", "", ""): GOOD, ("b", "", "", ""): BAD})


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(arguments)
    return code, *capsys.readouterr()


def test_list_shows_every_name(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "list")
    assert code == 0
    first = {line.split()[0] for line in out.splitlines() if line.strip()}
    for listing in (ik.solvers, ik.problems, ik.rules, ik.linear_solvers):
        assert set(listing()) <= first


@pytest.mark.parametrize("section", ["solvers", "problems", "rules", "linear-solvers", "plugins"])
@pytest.mark.parametrize("columns", ["60", "200"])
def test_tables_are_aligned(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, section: str, columns: str
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    code, out, _ = run(capsys, "list", section)
    title, *table = out.rstrip("\n").splitlines()
    assert code == 0 and title.startswith(f"{section} (")
    if table != ["  none"]:
        heading, rule, *rows = table
        starts = [i for i, c in enumerate(rule) if c == "-" and rule[i - 1] == " "]
        assert rows and all(heading[i - 1] == " " and heading[i] != " " for i in starts)
        for row in rows:
            assert all(row[i - 1] == " " for i in starts if i < len(row))


def test_list_json(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "list", "solvers", "--json")
    report: dict[str, Any] = json.loads(out)
    assert code == 0 and list(report) == ["solvers"]
    rows = {row["name"]: row for row in report["solvers"]}
    assert list(rows) == ik.solvers()
    assert rows["anderson"]["solves"] == "fixed_point"
    assert rows["anderson"]["options"]["memory"] == ik.Anderson().memory
    assert rows["anderson"]["target"] == "implicitkit.solver.fixed_point.anderson.Anderson"
    assert rows["scipy.newton_krylov"]["batch"] == "loop"
    assert set(json.loads(run(capsys, "list", "--json")[1])) == {
        "solvers", "problems", "rules", "linear-solvers", "plugins",
    }  # fmt: skip


def test_info(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "info", "--json")
    report = json.loads(out)
    assert code == 0
    assert report["versions"]["implicitkit"].startswith(ik.__version__)
    assert {"python", "torch", "numpy", "scipy"} <= set(report["versions"])
    assert report["devices"][0] == "cpu" and report["threads"]["intra-op"] >= 1
    code, out, _ = run(capsys, "info")
    assert code == 0 and all(word in out for word in ("torch", "threads", "devices", "plugins"))


@pytest.mark.usefixtures("broken")
@pytest.mark.parametrize("command", [("list",), ("list", "solvers"), ("info",), ("list", "plugins", "--json")])
def test_broken_plugin_is_told_and_strict_fails(capsys: pytest.CaptureFixture[str], command: tuple[str, ...]) -> None:
    code, out, err = run(capsys, *command)
    assert code == 0
    assert err == "plugin 'bad' of bad-parts 0.1 failed to load: ImportError: no luck\n"
    assert run(capsys, *command, "--strict")[0] == 1
    if "solvers" not in command:
        assert "ImportError: no luck" in out and "good" in out


def test_strict_passes_when_all_is_well(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugins, "_scanned", True)
    monkeypatch.setattr(plugins, "_plugins", {})
    assert run(capsys, "list", "--strict")[0] == 0


@pytest.mark.parametrize(
    ("arguments", "said"), [(["lists"], "invalid choice"), (["list", "solver"], "invalid choice"), (["--x"], "--x")]
)
def test_usage_errors_exit_with_2(capsys: pytest.CaptureFixture[str], arguments: list[str], said: str) -> None:
    code, _, err = run(capsys, *arguments)
    assert code == 2 and said in err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--version")
    assert code == 0 and out.startswith(f"implicitkit {ik.__version__}")


@pytest.mark.parametrize("section", ["solvers", "rules", "linear-solvers", "problems"])
def test_what_is_said_of_a_part_is_whole_sentences(capsys: pytest.CaptureFixture[str], section: str) -> None:
    rows = json.loads(run(capsys, "list", section, "--json")[1])[section]
    cut = [row["name"] for row in rows if not row["doc"].endswith(".") or row["doc"].endswith((",.", ":."))]
    assert rows and not cut


@pytest.mark.parametrize("arguments", [[], ["--help"]])
def test_help(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    code, out, _ = run(capsys, *arguments)
    assert code == 0 and "list" in out and "info" in out


def test_as_a_module(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process: another is one of test_a_reader_who_goes_away_is_no_error."""
    monkeypatch.setattr(sys, "argv", ["implicitkit", "list", "rules", "--json"])
    monkeypatch.delitem(sys.modules, "implicitkit.__main__", raising=False)  # runpy warns of what is there already
    with pytest.raises(SystemExit) as left:
        runpy.run_module("implicitkit", run_name="__main__")
    assert left.value.code == 0
    assert [row["name"] for row in json.loads(capsys.readouterr().out)["rules"]] == ik.rules()


@pytest.mark.parametrize(
    "section",
    [
        pytest.param(["list"], marks=pytest.mark.slow, id="more than a buffer"),
        pytest.param(["list", "rules"], id="less than a buffer"),
    ],
)
def test_a_reader_who_goes_away_is_no_error(section: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "implicitkit", *section], stdout=writer, stderr=subprocess.PIPE, text=True, timeout=300
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["picard"], 0, "all of"),
        (["picard", "--checks", "is_deterministic", "--accuracy", "1e-6"], 0, "is_deterministic"),
        (["cg", "--checks", "is_deterministic"], 0, "linear solver 'cg': all of"),
        (["phantom", "--checks", "is_deterministic"], 0, "rule 'phantom': all of"),
        (["cg", "--kind", "solvers"], 2, "There is a linear solver of that name"),
        (["picart"], 2, "Did you mean 'picard'?"),
        (["picard", "--checks", "speed"], 2, "no check 'speed'"),
        (["picard", "--import", "no_such_module"], 2, "no_such_module"),
    ],
)
def test_check(capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, said: str) -> None:
    got, out, err = run(capsys, "check", *arguments)
    assert got == code and said in (out if code == 0 else err)


def test_check_of_a_module_that_is_not_installed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(TABLES["solvers"], "entries", dict(TABLES["solvers"].entries))
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "a_wrong_solver.py").write_text(
        "import implicitkit as ik\n"
        "@ik.register_solver('a_wrong_solver', solves='fixed_point')\n"
        "class Wrong(ik.Method):\n"
        "    def step(self, f, z, state):\n"
        "        return z - 0.5 * (f(z) - z), state\n"
    )
    checks = ("--checks", "finds_known_solutions,is_deterministic")
    code, out, _ = run(capsys, "check", "a_wrong_solver", "--import", "a_wrong_solver", *checks, "--json")
    report = json.loads(out)
    assert code == 1 and not report["passed"]
    outcomes = {row["check"]: row for row in report["results"]}
    assert outcomes["finds_known_solutions"]["outcome"] == "failed" and outcomes["finds_known_solutions"]["mend"]
    assert outcomes["is_deterministic"]["outcome"] in ("passed", "failed")


def test_the_doctor_finds_a_healthy_installation(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "doctor")
    assert (code, out.splitlines()[-1]) == (0, "all is well"), out
    assert {"torch", "plugins", "self-test"} <= set(out.split())


def test_the_doctor_says_what_is_wrong(capsys: pytest.CaptureFixture[str], broken: None) -> None:
    code, out, _ = run(capsys, "doctor", "--json")
    findings = {row["name"]: row["problem"] for row in json.loads(out)["self-test"]}
    assert code == 1 and "no luck" in findings["plugin bad"] and not findings["plugin good"]


def test_the_doctor_notices_a_wrong_derivative(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "_cubic", lambda z, theta: z**3 + z - theta.detach())
    code, out, _ = run(capsys, "doctor")
    assert code == 1 and "FAILED" in out
