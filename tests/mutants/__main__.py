"""`python -m tests.mutants`: try each mutant, and say which survive."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from tests.mutants import executor, numerics, scheduler, storage
from tests.mutants.trial import Trial, attempt, check, copied_repository, failing

GROUPS = {
    "scheduler": scheduler.MUTANTS,
    "executor": executor.MUTANTS,
    "numerics": numerics.MUTANTS,
    "storage": storage.MUTANTS,
}


def main() -> int:
    """Exit status 1 when a mutant survives, or its tests do not run."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--only", metavar="TEXT", default="", help="mutants with this in their names")
    parser.add_argument("--group", choices=GROUPS)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    check([mutant for mutants in GROUPS.values() for mutant in mutants])
    trials: list[tuple[str, Trial]] = []
    with copied_repository() as root:
        for group, mutants in GROUPS.items():
            chosen = [mutant for mutant in mutants if options.only in mutant.name]
            if not chosen or options.group not in (None, group):
                continue
            wrong = failing(sorted({test for mutant in chosen for test in mutant.tests}), root)
            if wrong:
                print(f"{group}: without any mutant fails {wrong}", file=sys.stderr)
                return 1
            for mutant in chosen:
                trial = attempt(mutant, root)
                trials.append((group, trial))
                print(f"{trial.outcome:8} {group}: {mutant.name} ({trial.seconds:.0f} s) {trial.seen_by}", flush=True)
    killed = sum(trial.is_killed for _, trial in trials)
    print(f"{killed} of {len(trials)} mutants were killed")
    if options.json is not None:
        options.json.write_text(json.dumps(_as_dict(trials), indent=1) + "\n")
    return 0 if killed == len(trials) else 1


def _as_dict(trials: list[tuple[str, Trial]]) -> dict[str, object]:
    rows = [
        {"group": group, "mutant": trial.mutant.name, "file": trial.mutant.file, "outcome": trial.outcome,
         "seen_by": trial.seen_by}
        for group, trial in trials
    ]  # fmt: skip
    return {"mutants": len(rows), "killed": sum(trial.is_killed for _, trial in trials), "trials": rows}


if __name__ == "__main__":
    sys.exit(main())
