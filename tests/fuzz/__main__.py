"""``python -m tests.fuzz``: draw cases until the time is over, and print what became of them."""

from __future__ import annotations

import argparse
import collections
import sys
import time
import traceback

import torch

from .case import Case
from .judge import Verdict, judge
from .shrink import shrink
from .trials import Trial, draw, parse

KINDS = ("right", "refused", "wrong", "unhelpful", "slow")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=float, default=5.0, help="seconds for one case")
    parser.add_argument("--only", default="", help="cases whose line contains this")
    parser.add_argument("--case", default="", help="run this one, and show everything")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.case:
        return show(parse(options.case))
    found = search(options.seconds, options.seed, options.limit, options.only)
    return report(found)


def show(case: Trial) -> int:
    """One case, with its numbers and its traceback."""
    print(case)
    verdict = judge(case, limit=60.0)
    if isinstance(case, Case):
        print("want", case.want())
        try:
            print("got ", case.got())
        except Exception:
            traceback.print_exc()
    print(verdict)
    return int(verdict.kind not in ("right", "refused"))


Found = list[tuple[Trial, Verdict]]


def search(seconds: float, seed: int, limit: float, only: str) -> Found:
    """Judge cases number ``seed * 10^6``, the next, ... until the time is over."""
    found: Found = []
    classes: set[tuple[str, str]] = set()
    number, end = seed * 1_000_000, time.monotonic() + seconds
    while time.monotonic() < end:
        case = draw(number)
        number += 1
        if only not in str(case):
            continue
        verdict = judge(case, limit)
        if verdict.kind != "none":
            found.append((case, verdict))
        if verdict.kind in ("wrong", "unhelpful"):
            new = (verdict.kind, verdict.detail[:60]) not in classes  # of each class the first is made plain
            classes.add((verdict.kind, verdict.detail[:60]))
            plain = shrink(case, verdict) if isinstance(case, Case) and (new or verdict.kind == "wrong") else case
            print(f"{verdict.kind}: {verdict.detail}\n    python -m tests.fuzz --case '{plain}'", flush=True)
            print(f"    (number {number - 1}: {case})", flush=True)
    return found


def report(found: Found) -> int:
    """Counts, and messages by how often they came; 1 if anything was wrong or unhelpful."""
    count = collections.Counter(verdict.kind for _, verdict in found)
    print(f"\n{len(found)} cases: " + ", ".join(f"{count[kind]} {kind}" for kind in KINDS))
    for kind in KINDS[1:]:
        details = collections.Counter(v.detail for _, v in found if v.kind == kind)
        for detail, times in details.most_common(25):
            example = next(case for case, v in found if v.kind == kind and v.detail == detail)
            print(f"  {kind} {times:4d} x {detail}\n         {example}")
    slowest = sorted(found, key=lambda pair: -pair[1].seconds)[:3]
    print("slowest:", *(f"\n  {v.seconds:.1f} s  {case}" for case, v in slowest))
    return int(bool(count["wrong"] or count["unhelpful"]))


if __name__ == "__main__":
    sys.exit(main())
