"""What a long session of `dagexec stress` has tried, on the simulated device and on the host.

    python benchmarks/stress.py [--seconds 300] [--seed 2026] [--json FILE]

Each session gets the seconds. Nothing is written, and the exit status is 1, when a case shows a defect.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from environment import write_report

DEVICES = ("sim:0", "cpu")


def session(device: str, seconds: float, seed: int) -> dict[str, Any]:
    """The report of one session, in a process of its own. Exits with what it found when that is a defect."""
    command = [sys.executable, "-m", "dagexec", "stress", "--device", device, "--json"]
    ended = subprocess.run(
        [*command, "--seconds", str(seconds), "--seed", str(seed)], stdout=subprocess.PIPE, text=True
    )
    if ended.returncode:
        sys.exit(ended.returncode)
    report: dict[str, Any] = json.loads(ended.stdout)
    return report


def main() -> None:
    """Run both sessions and print their rates."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--seed", type=int, default=2026)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    sessions = [session(device, options.seconds, options.seed) for device in DEVICES]
    for report in sessions:
        print(
            f"{report['device']:6} {report['cases']:6} cases, {report['runs']:8} runs in {report['seconds']:.0f} s, "
            "no defect"
        )
    if options.json is not None:
        write_report(options.json, sessions=sessions)


if __name__ == "__main__":
    main()
