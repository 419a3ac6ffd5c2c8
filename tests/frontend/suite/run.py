"""`python -m tests.frontend.suite.run [PATTERN...]`: what the suite's cases come to, and a summary."""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

os.environ.setdefault("DAGEXEC_TUNING_SECONDS", "0")  # before anything of dagexec looks

import onnx

from tests.frontend.suite.cases import Case, Outcome, all_cases, exclusions

_PATIENCE = 60  # seconds until a case counts as hanging


class _Hangs(BaseException):
    """Not an Exception, so that nothing on the way takes it for an operator's."""


def main() -> int:
    """Exit status 1 when a case that is not excluded did not pass."""
    options = _options()
    given = dict(setting.split("=", 1) for setting in options.set)
    settings = {name: json.loads(value) for name, value in given.items()}
    signal.signal(signal.SIGALRM, _hang)
    wanted = [case for case in all_cases() if all(re.search(pattern, case.name) for pattern in options.pattern)]
    wanted = [case for case in wanted if options.all or case.is_ordinary()]
    excluded = exclusions()
    rows: list[tuple[Case, Outcome]] = []
    for case in wanted:
        outcome = _outcome(case, settings)
        rows.append((case, outcome))
        if outcome.result != "passed" and not options.quiet:
            mark = " (excluded)" if case.name in excluded else ""
            reason = " ".join(outcome.reason.split())[: options.width]
            print(f"{outcome.result:8} {case.name}{mark}: {reason}", flush=True)
    _print_summary(rows)
    if options.json:
        Path(options.json).write_text(json.dumps(_report(rows), indent=1) + "\n")
    return any(outcome.result != "passed" and case.name not in excluded for case, outcome in rows)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pattern", nargs="*", help="regular expressions that a case's name must all contain")
    parser.add_argument("--all", action="store_true", help="also other domains, types of few bits, and random results")
    parser.add_argument("--set", nargs="*", default=[], help="options of compile as NAME=JSON")
    parser.add_argument("--quiet", action="store_true", help="print the summary only")
    parser.add_argument("--width", type=int, default=240, help="characters of a reason")
    parser.add_argument("--json", help="write what each case came to")
    return parser.parse_args()


def _hang(_signal: int, _frame: FrameType | None) -> None:
    raise _Hangs


def _outcome(case: Case, settings: dict[str, Any]) -> Outcome:
    signal.alarm(_PATIENCE)
    try:
        return case.run(**settings)
    except _Hangs:
        return Outcome("broken", f"it hangs: not done after {_PATIENCE} s")
    finally:
        signal.alarm(0)


def _print_summary(rows: list[tuple[Case, Outcome]]) -> None:
    for title, chosen in (("all", rows), ("ordinary", [row for row in rows if row[0].is_ordinary()])):
        counts = Counter(outcome.result for _, outcome in chosen)
        share = counts["passed"] / max(1, len(chosen))
        print(f"{title}: {counts['passed']} of {len(chosen)} passed ({share:.1%}); {dict(counts)}")


def _report(rows: list[tuple[Case, Outcome]]) -> dict[str, Any]:
    return {
        "onnx": onnx.__version__,
        "cases": {
            case.name: {"result": outcome.result, "ordinary": case.is_ordinary()} | _reason(outcome)
            for case, outcome in rows
        },
    }


def _reason(outcome: Outcome) -> dict[str, str]:
    return {"reason": outcome.reason[:200]} if outcome.reason else {}


if __name__ == "__main__":
    sys.exit(main())
