"""Random nets, optimized and not: `python -m tests.nan --nets 2000 --layers 2` prints those that differ."""

from __future__ import annotations

import argparse
import logging
import sys

from tests.nan.comparison import compared
from tests.nan.nets import Builder


def main() -> int:
    """How many differ, at most 1."""
    parser = argparse.ArgumentParser(prog="python -m tests.nan", description=__doc__)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--nets", type=int, default=1000, help="how many")
    parser.add_argument("--layers", type=int, help="of each; by default the seed decides")
    given = parser.parse_args()
    logging.disable(logging.WARNING)
    differing = 0
    for seed in range(given.first, given.first + given.nets):
        found = compared(seed, given.layers)
        if found:
            differing += 1
            types = " ".join(one.type for one in Builder(seed, given.layers).build().net.op)
            print(f"net {seed}: {types}: {found[0]}", flush=True)
    print(f"{differing} of {given.nets} nets differ")
    return int(differing > 0)


if __name__ == "__main__":
    sys.exit(main())
