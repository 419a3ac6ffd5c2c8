"""Which runtime is faster on my graph, and what does the graph allow?

      +-> branch -+
data -+-> branch -+-> join        workers: 1, 2
      +-> branch -+
"""

import sys

from dagexec.analysis import compare

REPEAT = 5


def main(source: str = "zoo:googlenet") -> None:
    """Print a line for each runtime: time, speed-up, and the speed-up that list scheduling predicts."""
    comparison = compare(source, workers=(1, 2), repeat=REPEAT)
    for row in comparison.rows:
        print(
            f"{row.net_type:10} {row.workers} worker(s): {row.median_ms:8.2f} ms, speed-up {row.speed_up:.2f} "
            f"of {row.predicted:.2f} predicted, same bytes: {row.same_bytes}"
        )


if __name__ == "__main__":
    main(*sys.argv[1:2])
