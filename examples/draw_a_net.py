"""What does the DAG of my model look like, and how is it split into chains?

model -> graph -> plan -> net.png (or .svg, or .dot for Graphviz)
"""

import sys
from pathlib import Path

import dagexec
from dagexec.analysis import draw_graph
from dagexec.testing import random_feeds


def main(source: str = "zoo:googlenet", file: str = "net.dot") -> None:
    """Draw the operators of one chain in one color."""
    with dagexec.compile(source) as executor:
        executor.run(random_feeds(executor.model))
        plan = executor.net().plan
    draw_graph(plan, Path(file))
    print(f"{file}: {len(plan.graph)} operators in {len(plan.chains)} chains")


if __name__ == "__main__":
    main(*sys.argv[1:])
