"""`python -m tests.machines`: look at all worlds, small and large, and print how many states they have."""

from __future__ import annotations

import argparse
import sys

from tests.machines import test_arena_machine, test_cluster_machine, test_dispatch_machine, test_repository_machine
from tests.machines.worlds import searched

GROUPS = {
    "dispatch": test_dispatch_machine.WORLDS,
    "cluster": test_cluster_machine.WORLDS,
    "models": test_repository_machine.WORLDS,
    "arenas": test_arena_machine.WORLDS,
}


def main() -> int:
    """Exit status 1 when something goes wrong in a world."""
    parser = argparse.ArgumentParser(prog="python -m tests.machines", description=__doc__)
    parser.add_argument("--only", metavar="TEXT", default="", help="worlds with this in their names")
    parser.add_argument("--group", choices=GROUPS)
    parser.add_argument("--most", type=int, metavar="STATES", help="of each world; by default all")
    options = parser.parse_args()
    wrong = False
    for group, worlds in GROUPS.items():
        for name, setting in worlds.items():
            if options.only not in name or options.group not in (None, group):
                continue
            found = searched(setting.world, most=options.most)
            wrong = wrong or found.fault is not None
            how_far = "all" if found.exhausted else found.fault or f"up to {found.depth} events"
            print(f"{group}: {name}: {found.states:,} states, {found.transitions:,} events, {how_far}", flush=True)
            for label in found.path:
                print(f"    {label}")
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
