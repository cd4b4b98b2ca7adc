"""The command line: what is registered, and what this installation consists of.

    python -m implicitkit list [solvers|problems|rules|linear-solvers|plugins] [--json] [--strict]
    python -m implicitkit info [--json] [--strict]
    python -m implicitkit doctor [--json]
    python -m implicitkit --version
    python -m implicitkit check NAME [--kind KIND] [--import MODULE] [--checks NAME,...] [--accuracy RTOL] [--json]

Exit codes: 0 in order; 1 the solver failed a check, the doctor found something, or a plugin failed to load and ``--strict``
was given; 2 the command was not understood (no such solver, section or check); 141 the reader of the output went away.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import os
import platform
import shutil
import sys
import textwrap
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from importlib import metadata
from typing import Any

from implicitkit.registry.plugins import PluginWarning, plugins
from implicitkit.registry.table import describe

_CHECKED = ("solvers", "linear-solvers", "rules")
_SECTIONS = ("solvers", "problems", "rules", "linear-solvers", "plugins")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line with ``arguments`` (default: ``sys.argv``) and return its exit code."""
    try:
        code = _run(arguments)
        sys.stdout.flush()
    except BrokenPipeError:  # ``| head`` has read enough; Python would write again at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141  # as of a tool that SIGPIPE has ended
    return code


def _run(arguments: Sequence[str] | None) -> int:
    parser = _parser()
    try:
        options = parser.parse_args(arguments)
    except SystemExit as ended:  # argparse has printed help (0) or what it did not understand (2)
        return int(ended.code or 0)
    if options.command is None:
        parser.print_help()
        return 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PluginWarning)  # said below, once, and in full
        broken = [plugin for plugin in plugins() if not plugin.loaded]
    if options.command == "check":
        return _check(options)
    if options.command == "doctor":
        return _doctor(options)
    report = _list(options.section) if options.command == "list" else _info()
    if options.json:
        print(json.dumps(report, indent=2))
    else:
        print(_render_list(report) if options.command == "list" else _render_info(report))
    for plugin in broken:
        print(
            f"plugin {plugin.name!r} of {plugin.distribution} {plugin.version} failed to load: {plugin.error}",
            file=sys.stderr,
        )
    return 1 if broken and options.strict else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="implicitkit", description="What implicitkit knows, and what it runs on.")
    parser.add_argument("--version", action="version", version=f"implicitkit {_version('implicitkit')}")
    commands = parser.add_subparsers(dest="command", metavar="command")
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--json", action="store_true", help="print JSON instead of a table")
    common.add_argument("--strict", action="store_true", help="exit with 1 if a plugin failed to load")
    listing = commands.add_parser("list", parents=[common], help="list what is registered, plugins included")
    listing.add_argument("section", nargs="?", choices=_SECTIONS, help="one section only (default: all)")
    commands.add_parser("info", parents=[common], help="versions, threads, devices, plugins")
    doctor = commands.add_parser("doctor", help="versions, devices, plugins, and a self-test of ten seconds")
    doctor.add_argument("--json", action="store_true", help="print JSON instead of text")
    check = commands.add_parser("check", help="run the conformance suite on a solver, linear solver or rule")
    check.add_argument("solver", help="the name it is registered by")
    check.add_argument(
        "--kind", choices=_CHECKED, help="what the name is that of (default: the first of these that has it)"
    )
    check.add_argument(
        "--import", dest="modules", action="append", default=[], metavar="MODULE", help="import this first (no plugin)"
    )
    check.add_argument("--checks", help="names of checks, separated by commas (default: all)")
    check.add_argument("--accuracy", type=float, help="the tightest relative tolerance the solver is meant to reach")
    check.add_argument("--json", action="store_true", help="print JSON instead of text")
    return parser


def _check(options: argparse.Namespace) -> int:
    from implicitkit import testing  # only this command needs it

    suites: dict[str, Any] = {"solvers": testing.check_solver, "rules": testing.check_rule}
    keywords = {} if options.accuracy is None else {"accuracy": options.accuracy}
    try:
        for module in options.modules:
            importlib.import_module(module)
        kind = options.kind or next(
            (k for k in _CHECKED if any(e.name == options.solver for e in describe(k))), "solvers"
        )
        run = suites.get(kind, testing.check_linear_solver)
        checks = None if options.checks is None else options.checks.split(",")
        report = run(options.solver, checks=checks, raise_on_failure=False, **keywords)
    except (ImportError, ValueError) as error:
        print(f"implicitkit check: {error}", file=sys.stderr)
        return 2
    if options.json:
        print(json.dumps({"passed": report.passed, **asdict(report)}, indent=2))
    else:
        print(report)
    return 0 if report.passed else 1


def _doctor(options: argparse.Namespace) -> int:
    from implicitkit.cli.doctor import examine  # only this command needs it

    report = _info()
    if not options.json:
        print(_render_info(report) + "\n\nself-test")
    findings = []
    for finding in examine():
        findings.append(finding)
        if not options.json:
            verdict = f"FAILED  {finding.problem}" if finding.problem else f"ok      {finding.seconds:.2f} s"
            print(f"  {finding.name:<42}{verdict}", flush=True)
    failed = sum(bool(finding.problem) for finding in findings)
    if options.json:
        print(json.dumps(report | {"self-test": [asdict(finding) for finding in findings]}, indent=2))
    else:
        print(f"{failed} of {len(findings)} failed" if failed else "all is well")
    return 1 if failed else 0


# ------------------------------------------------------------------------------------------------------- what is there
def _list(section: str | None) -> dict[str, list[dict[str, Any]]]:
    sections = _SECTIONS if section is None else (section,)
    return {name: _plugin_rows() if name == "plugins" else _rows(name) for name in sections}


def _rows(section: str) -> list[dict[str, Any]]:
    rows = []
    for entry in describe(section):
        row: dict[str, Any] = {"name": entry.name}
        if section == "solvers":
            row |= {"solves": entry.solves, "batch": entry.batch or "per sample"}
            row["unknowns"] = "any" if entry.max_size is None else entry.max_size
        if section == "problems":
            row |= {"kind": entry.solves, "rule": _label(entry.rule), "linear_solver": _label(entry.linear_solver)}
        else:
            row["options"] = {option: _default(value) for option, value in entry.options.items()}
        rows.append(row | {"origin": entry.origin, "target": _path(entry.target), "doc": entry.doc})
    return rows


def _plugin_rows() -> list[dict[str, Any]]:
    return [asdict(plugin) for plugin in plugins()]


def _label(part: Any) -> str:
    return part if isinstance(part, str) else getattr(part, "name", "") or type(part).__name__


def _path(target: Any) -> str:
    return f"{getattr(target, '__module__', '?')}.{getattr(target, '__qualname__', type(target).__name__)}"


def _default(value: Any) -> Any:
    if value is inspect.Parameter.empty:
        return "required"
    return value if isinstance(value, (bool, int, float, str)) or value is None else repr(value)


def _info() -> dict[str, Any]:
    import torch

    versions = {"python": platform.python_version()}
    for package in ("implicitkit", "torch", "numpy", "scipy", "networkx"):
        versions[package] = _version(package)
    devices = ["cpu"]
    if torch.cuda.is_available():
        devices += [f"cuda:{i} {torch.cuda.get_device_name(i)}" for i in range(torch.cuda.device_count())]
    if torch.backends.mps.is_available():
        devices.append("mps")
    return {
        "versions": versions,
        "platform": platform.platform(),
        "threads": {"intra-op": torch.get_num_threads(), "inter-op": torch.get_num_interop_threads()},
        "devices": devices,
        "plugins": _plugin_rows(),
    }


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        module = importlib.import_module(package)
        return f"{getattr(module, '__version__', 'unknown')} (not installed as a distribution)"


# --------------------------------------------------------------------------------------------------------- how it looks
def _render_list(report: dict[str, list[dict[str, Any]]]) -> str:
    return "\n\n".join(
        f"{section} ({len(rows)})\n{_plugin_table(rows) if section == 'plugins' else _table(rows)}"
        for section, rows in report.items()
    )


def _plugin_table(rows: list[dict[str, Any]]) -> str:
    return _table(
        [
            {
                "name": row["name"],
                "distribution": f"{row['distribution']} {row['version']}",
                "module": row["module"],
                "state": "loaded" if row["loaded"] else f"broken: {row['error']}",
            }
            for row in rows
        ]
    )


def _render_info(report: dict[str, Any]) -> str:
    pairs = {**report["versions"], "platform": report["platform"]}
    pairs["threads"] = ", ".join(f"{count} {name}" for name, count in report["threads"].items())
    pairs["devices"] = ", ".join(report["devices"])
    width = max(map(len, pairs))
    lines = [f"{name.ljust(width)}  {value}" for name, value in pairs.items()]
    return "\n".join([*lines, "", f"plugins ({len(report['plugins'])})", _plugin_table(report["plugins"])])


def _table(rows: list[dict[str, Any]]) -> str:
    """Aligned columns; the last one is wrapped to the width of the terminal."""
    if not rows:
        return "  none"
    rows = [{k: _cell(v) for k, v in row.items() if k != "target"} for row in rows]
    headings = list(rows[0])
    columns = [[heading.replace("_", " "), *(row[heading] for row in rows)] for heading in headings]
    widths = [min(max(map(len, column)), 48) for column in columns[:-1]]
    start = 2 + sum(w + 2 for w in widths)
    last = max(shutil.get_terminal_size((120, 24)).columns - start, 32)
    lines = []
    for cells in zip(*columns, strict=True):
        wrapped = [textwrap.wrap(c, w) or [""] for c, w in zip(cells, [*widths, last], strict=True)]
        for i in range(max(map(len, wrapped))):
            parts = [w[i] if i < len(w) else "" for w in wrapped]
            padded = [p.ljust(w) for p, w in zip(parts, [*widths, 0], strict=True)]
            lines.append("  " + "  ".join(padded).rstrip())
    lines.insert(1, "  " + "  ".join("-" * w for w in [*widths, min(last, max(map(len, columns[-1])))]))
    return "\n".join(lines)


def _cell(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{k}={v}" for k, v in value.items()) or "-"
    return str(value) or "-"
