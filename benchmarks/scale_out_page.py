"""What the simulation says of 1 to 1,000 replicas: tables and a picture for docs/scale-out.md.

    python benchmarks/scale_out_page.py [--results benchmarks/results/scale_out.json]

It takes the service times, the front end's and the network's that `scale_out.py` measured with one client of one local
replica, gives each replica a core of its own and each 16 replicas a front end, and asks for 80% of what they can do.
Numbers are the same whenever and wherever it runs, as nothing is measured here.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib as mpl

from dagexec.cluster.simulation import Cluster, Constant, Empirical, Poisson, simulate

RESULTS = Path(__file__).parent / "results" / "scale_out.json"
PAGE = Path(__file__).parents[1] / "docs" / "scale-out.md"
PICTURE = PAGE.with_suffix(".png")
REPLICAS = (1, 2, 4, 10, 30, 100, 300, 1000)
ROUTERS = {"least": "fewest outstanding", "round_robin": "one after the other", "random": "random"}
SHARE = 0.8
PER_FRONT_END = 16
REQUESTS, PER_REPLICA = 20_000, 100


def described(found: dict[str, Any]) -> Cluster:
    """What was measured, as a cluster whose replicas have cores of their own."""
    return Cluster(
        Empirical([sample / 1e3 for sample in found["service_ms"]]),
        network=Constant(found["network_ms"] / 2e3),
        send_seconds=found["front_end_ms"] / 2e3,
        receive_seconds=found["front_end_ms"] / 2e3,
    )


def curves(cluster: Cluster, seconds: float) -> list[dict[str, Any]]:
    """For each number of replicas: p50 and p99 by router, with many front ends, and answers a second with one."""
    rows = []
    for count in REPLICAS:
        rate = SHARE * count / seconds
        requests = REQUESTS + PER_REPLICA * count
        row: dict[str, Any] = {"replicas": count, "rate": rate}
        for routing in ROUTERS:
            many = replace(cluster, replicas=count, routing=routing, front_ends=-(-count // PER_FRONT_END))
            row[routing] = simulate(many, Poisson(rate), requests, 1).summary()
        row["one"] = simulate(replace(cluster, replicas=count), Poisson(rate), requests, 1).summary()
        rows.append(row)
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    lines = ["| replicas | requests/s | " + " | ".join(f"{name}: p50, p99 ms" for name in ROUTERS.values())]
    lines[0] += " | answers/s with a single front end |"
    lines.append("|---" * 6 + "|")
    for row in rows:
        cells = (f"{row[name]['p50_ms']:.0f}, {row[name]['p99_ms']:.0f}" for name in ROUTERS)
        one = f"{row['one']['requests_per_second']:,.0f}"
        lines.append(f"| {row['replicas']:,} | {row['rate']:,.0f} | {' | '.join(cells)} | {one} |")
    return "\n".join(lines)


def validation(found: dict[str, Any]) -> str:
    """Measured, predicted, and their difference."""
    names = {"requests_per_second": "answers/s", "p50_ms": "p50 ms", "p95_ms": "p95 ms", "p99_ms": "p99 ms"}
    lines = ["| replicas | load | " + " | ".join(names.values()) + " |", "|---" * 6 + "|"]
    for row in found["rows"]:
        cells = [f"{row['measured'][key]:.1f}, {row['predicted'][key]:.1f} ({row['error'][key]:+.0%})" for key in names]
        lines.append(f"| {row['replicas']} | {row['load']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(rows: list[dict[str, Any]]) -> None:
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), dpi=90)
    counts = [row["replicas"] for row in rows]
    for name, label in ROUTERS.items():
        left.plot(counts, [row[name]["p99_ms"] for row in rows], marker="o", label=label)
    left.set(xscale="log", yscale="log", xlabel="replicas", ylabel="p99 in ms", title="80% load, by router")
    left.legend()
    right.plot(counts, [row["rate"] for row in rows], "k:", label="asked")
    for name, label in (("least", f"a front end for {PER_FRONT_END}"), ("one", "a single front end")):
        right.plot(counts, [row[name]["requests_per_second"] for row in rows], marker="o", label=label)
    right.set(xscale="log", yscale="log", xlabel="replicas", ylabel="answers a second", title="throughput")
    right.legend()
    figure.tight_layout()
    figure.savefig(PICTURE, metadata={"Software": None})


def write(name: str, text: str) -> None:
    """Put a table between its marks in the page."""
    page = PAGE.read_text()
    begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
    before, _, rest = page.partition(begin)
    _, _, after = rest.partition(end)
    PAGE.write_text(f"{before}{begin}\n{text}\n\n{end}{after}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS)
    found = json.loads(parser.parse_args().results.read_text())["processes"]
    cluster = described(found)
    rows = curves(cluster, sum(found["service_ms"]) / len(found["service_ms"]) / 1e3)
    write("validation", validation(found))
    write("curves", table(rows))
    draw(rows)


if __name__ == "__main__":
    main()
