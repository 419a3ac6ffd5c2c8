"""docs/benchmarks.md and its plot, from the record that `cnn.py` writes.

python benchmarks/cnn_page.py        # again from benchmarks/results/cnn.json, without measuring
"""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.pyplot as plt
from cnn_measure import CALLERS, MATRIX_SIZE, OURS, PEERS, TOLERANCE, better_ratio
from cnn_models import NAMES, TINY_NAMES
from environment import LIMITS

matplotlib.use("svg")
matplotlib.rcParams["svg.hashsalt"] = "dagexec"  # the same file for the same numbers

Row = Mapping[str, Any]

PLOT = "benchmarks.svg"
_TITLE = "# Whole networks on the processor"
_TORCH = "torch"
_WIDTH = 120  # of a line


@dataclass(frozen=True)
class Target:
    """A limit on the ratios against the better of onnxruntime and OpenVINO at one batch size and thread count."""

    batch: int
    threads: int
    mean: float
    worst: float | None = None


_WIDE = (
    Target(batch=1, threads=2, mean=0.80, worst=0.95),
    Target(batch=1, threads=1, mean=0.82, worst=0.95),
    Target(batch=8, threads=2, mean=0.85),
    Target(batch=8, threads=1, mean=0.85),
)
_NARROW = (Target(batch=1, threads=2, mean=0.90, worst=1.05), Target(batch=1, threads=1, mean=0.90, worst=1.05))
THROUGHPUT_TARGET = 1.15
TINY_TARGET = 1.0
RESNET50_BATCH_8_TARGET = 0.80


def better_rate_ratio(row: Row) -> float | None:
    """Our inferences a second over those of the better peer. None when neither was measured."""
    ratios = [row["ratios"][peer] for peer in PEERS if peer in row["ratios"]]
    return min(ratios) if ratios else None


def geometric_mean(values: Sequence[float]) -> float:
    """Of positive numbers, at least one."""
    return math.exp(sum(map(math.log, values)) / len(values))


def targets(instruction_set: str) -> tuple[Target, ...]:
    """Those for processors with an instruction set."""
    return _WIDE if instruction_set.startswith("AVX512") else _NARROW


def write_page(reports: Mapping[str, Mapping[str, Any]], folder: Path) -> None:
    """Write this part of benchmarks.md, and the plot, into `folder`, from a report for each instruction set.

    What stands above the part's title is kept. It needs matplotlib.
    """
    document = folder / "benchmarks.md"
    above = document.read_text().partition(_TITLE)[0] if document.exists() else ""
    document.write_text(above + page(reports))
    plot(reports, folder / PLOT)


def page(reports: Mapping[str, Mapping[str, Any]]) -> str:
    """The whole page: a part for each instruction set, the newest first."""
    parts = [_head(next(iter(reports.values())))]
    for name, report in sorted(reports.items(), key=lambda item: -len(item[0])):
        parts += [_measured(name, report), *_tables(name, report)]
    return "\n\n".join(parts) + "\n"


def _tables(name: str, report: Mapping[str, Any]) -> list[str]:
    parts = [_verdicts(report, targets(name))]
    latencies: Sequence[Row] = report["latencies"]
    for target in targets(name):
        rows = [row for row in _large(latencies) if (row["batch"], row["threads"]) == (target.batch, target.threads)]
        if rows:
            title = f"### {name}: batch {target.batch}, {_threads(target.threads)}"
            parts.append("\n\n".join((title, _latency_table(rows))))
    if report["throughputs"]:
        parts.append(_throughput_section(report["throughputs"]))
    tiny = [row for row in latencies if row["model"] in TINY_NAMES]
    if tiny:
        parts.append(_tiny_section(tiny))
    return [*parts, _settings_section(report)]


def _head(report: Mapping[str, Any]) -> str:
    return f"""{_TITLE}

Written by `python benchmarks/cnn.py --write-docs`; `make benchmark-cnn` and `make benchmark-cnn-avx2` install the
peers first. All numbers are in `benchmarks/results/cnn.json`. There is a section for each instruction set.

- Networks: the nine light models of the `onnx` package, and MobileNetV2, Inception v3 and NASNet-A (4 @ 1056) from the
  zoo, with He-normal weights. All contenders read the same ONNX file and compute in float32.
- dagexec is `dagexec.compile(model)` with no options. Each peer runs at the fastest of a small set of settings (below)
  and is called in its fastest way, with inputs and outputs bound once.
- Each contender is a process of its own on the first 1 or 2 cores, and sleeps during the others' turns. A time is the
  median over interleaved rounds of a turn's median, a ratio the median over the rounds of the quotient within a round.
- The benchmark stops if an output differs from onnxruntime's by more than {TOLERANCE:g} of the largest element.
- Floor: floating-point operations, as dagexec's schemas count them, divided by the rate of NumPy's product of two
  {MATRIX_SIZE} x {MATRIX_SIZE} matrices on the same threads in the same rounds. Winograd's algorithm needs fewer
  operations, so a net of 3x3 convolutions may get below the floor; memory traffic and depthwise convolutions keep
  other nets above it.

![ratio of times, dagexec over the better of onnxruntime and OpenVINO]({PLOT})"""


def _measured(name: str, report: Mapping[str, Any]) -> str:
    """On what, with which versions and how often the figures of a part were measured, and who was limited."""
    environment, effort = report["environment"], report["effort"]
    versions = ", ".join(
        f"{package} {environment[package]}"
        for package in ("onnxruntime", "openvino", "torch", "numpy")
        if package in environment
    )
    library = f", oneDNN {environment['onednn']}" if "onednn" in environment else ""
    absent = "".join(f" {column} was left out: {reason}." for column, reason in report["absent"].items())
    text = (
        f"Processor: {environment['processor']}, {environment['cores']} cores, instruction set {name}. "
        f"Python {environment['python']}, {versions}{library}. Each figure is from {effort['rounds']} interleaved "
        f"rounds of turns of {effort['turn_seconds']:g} s.{absent}{report.get('note', '')}"
    )
    parts = [f"## {name}", textwrap.fill(text, _WIDTH, break_on_hyphens=False)]
    limits = [f"`{limit}={environment[limit]}`" for limit in LIMITS if limit in environment]
    if limits:
        text = (
            f"The processor supports AVX-512, but {' and '.join(limits)} keep dagexec and NumPy from using it. "
            "OpenVINO's convolutions and products are oneDNN's and obey the first limit, too. Its own kernels, such as "
            "a mean over pixels, do not (`instructions` in the file is the newest set that ran). onnxruntime has no "
            "such switch: it was **not** limited, and may have used AVX-512."
        )
        parts.append(textwrap.fill(text, _WIDTH, break_on_hyphens=False))
    return "\n\n".join(parts)


def _verdicts(report: Mapping[str, Any], limits: Sequence[Target]) -> str:
    lines = ["### Against the targets", "", "| what | target | measured | |", "|---|---|---|---|"]
    for target in limits:
        ratios = {
            row["model"]: ratio
            for row in _large(report["latencies"])
            if (row["batch"], row["threads"]) == (target.batch, target.threads) and (ratio := better_ratio(row))
        }
        if not ratios:
            continue
        where = f"batch {target.batch}, {_threads(target.threads)}"
        lines.append(_verdict(f"{where}: geometric mean", target.mean, geometric_mean(list(ratios.values()))))
        if target.worst:
            worst = max(ratios, key=ratios.__getitem__)
            lines.append(_verdict(f"{where}: worst network ({worst})", target.worst, ratios[worst]))
        if target.batch == 8 and "resnet50" in ratios:
            lines.append(_verdict(f"{where}: resnet50", RESNET50_BATCH_8_TARGET, ratios["resnet50"]))
    gains = {row["model"]: gain for row in report["throughputs"] if (gain := better_rate_ratio(row))}
    if gains:
        worst = min(gains, key=gains.__getitem__)
        where = f"throughput, {CALLERS} concurrent requests"
        mean = geometric_mean(list(gains.values()))
        lines.append(_verdict(f"{where}: geometric mean", THROUGHPUT_TARGET, mean, at_least=True))
        lines.append(_verdict(f"{where}: worst network ({worst})", THROUGHPUT_TARGET, gains[worst], at_least=True))
    for row in report["latencies"]:
        if row["model"] in TINY_NAMES and "onnxruntime" in row["ratios"]:
            what = f"{row['model']}, {_threads(row['threads'])}, against onnxruntime"
            lines.append(_verdict(what, TINY_TARGET, row["ratios"]["onnxruntime"]))
    return "\n".join(lines)


def _verdict(what: str, target: float, found: float, *, at_least: bool = False) -> str:
    met = found >= target if at_least else found <= target
    limit = f"{'at least' if at_least else 'at most'} {target:.2f}"
    return f"| {what} | {limit} | {found:.3f} | {'met' if met else 'missed'} |"


def _latency_table(rows: Sequence[Row]) -> str:
    """Milliseconds of every contender, ratios and the floor; torch's best variant stands for torch."""
    lines = [
        "| network | GFLOP | onnxruntime | OpenVINO | torch | dagexec | over the better | floor | times the floor |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        times = row["times"]
        ours = times[OURS]["milliseconds"]
        ratio = better_ratio(row)
        cells = [
            row["model"],
            f"{row['gflop']:.2f}",
            *(_milliseconds(times.get(peer)) for peer in PEERS),
            _best_torch(times),
            f"{_milliseconds(times[OURS])} ms",
            "" if ratio is None else f"**{ratio:.2f}**",
            f"{row['floor_ms']:.2f} ms",
            f"{ours / row['floor_ms']:.2f}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    ratios = [ratio for row in rows if (ratio := better_ratio(row))]
    if ratios:
        lines.append(f"| geometric mean | | | | | | **{geometric_mean(ratios):.3f}** | | |")
    return "\n".join(lines)


def _milliseconds(time: Row | None) -> str:
    if time is None:
        return ""
    value = time["milliseconds"]
    return f"{value:.3f}" if value < 1 else f"{value:.2f}"


def _best_torch(times: Mapping[str, Row]) -> str:
    variants = {name: time for name, time in times.items() if name.startswith(_TORCH)}
    if not variants:
        return ""
    best = min(variants, key=lambda name: variants[name]["milliseconds"])
    return f"{_milliseconds(variants[best])} ({best.removeprefix(_TORCH).strip()})"


def _throughput_section(rows: Sequence[Row]) -> str:
    lines = [
        f"### Throughput: {CALLERS} concurrent requests, batch 1",
        "",
        "Inferences per second. dagexec: `compile(model, replicas=2)`, called from threads; OpenVINO:",
        "`AsyncInferQueue`; onnxruntime: one session, called from threads; both at the fastest of their settings.",
        "",
        "| network | onnxruntime | OpenVINO | dagexec | over the better |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        gain = better_rate_ratio(row)
        rates = (f"{row['rates'][column]:.1f}" if column in row["rates"] else "" for column in (*PEERS, OURS))
        lines.append("| " + " | ".join((row["model"], *rates, "" if gain is None else f"**{gain:.2f}**")) + " |")
    gains = [gain for row in rows if (gain := better_rate_ratio(row))]
    if gains:
        lines.append(f"| geometric mean | | | | **{geometric_mean(gains):.3f}** |")
    return "\n".join(lines)


def _tiny_section(rows: Sequence[Row]) -> str:
    lines = [
        "### Tiny networks: what a call costs",
        "",
        "Microseconds per run at batch 1: LeNet; ten layers of 64 units; 200 elementwise operators on 64 numbers.",
        "",
        "| network | threads | onnxruntime | OpenVINO | torch | dagexec | over onnxruntime |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        times = row["times"]
        torch = [time["milliseconds"] for name, time in times.items() if name.startswith(_TORCH)]
        cells = [
            row["model"],
            str(row["threads"]),
            *(f"{1e3 * times[peer]['milliseconds']:.1f}" if peer in times else "" for peer in PEERS),
            f"{1e3 * min(torch):.1f}" if torch else "",
            f"{1e3 * times[OURS]['milliseconds']:.1f}",
            f"**{row['ratios']['onnxruntime']:.2f}**" if "onnxruntime" in row["ratios"] else "",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _settings_section(report: Mapping[str, Any]) -> str:
    """Which settings won, and how often."""
    lines = [
        "### Settings",
        "",
        "How often each of the settings tried was a peer's fastest:",
        "",
        "| contender | threads | setting | rows |",
        "|---|---|---|---|",
    ]
    counts: dict[tuple[str, int, str], int] = {}
    for row in report["latencies"]:
        for column, time in row["times"].items():
            if len(time["tried"]) > 1:
                key = (column, row["threads"], ", ".join(f"{name}={value}" for name, value in time["setting"].items()))
                counts[key] = counts.get(key, 0) + 1
    lines += [f"| {column} | {threads} | `{text}` | {n} |" for (column, threads, text), n in sorted(counts.items())]
    return "\n".join(lines)


def _large(rows: Iterable[Row]) -> list[Row]:
    return [row for row in rows if row["model"] in NAMES]


def _threads(count: int) -> str:
    return f"{count} thread{'s' if count > 1 else ''}"


def plot(reports: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """A bar for each network and number of threads: our time over the better peer's; a line at 1.

    There is a plot for each instruction set and batch.
    """
    parts = [
        (name, batch, [row for row in _large(report["latencies"]) if row["batch"] == batch and better_ratio(row)])
        for name, report in sorted(reports.items(), key=lambda item: -len(item[0]))
        for batch in sorted({row["batch"] for row in _large(report["latencies"])})
    ]
    figure, axes = plt.subplots(len(parts) or 1, 1, figsize=(9, 3.2 * (len(parts) or 1)), squeeze=False)
    for axis, (name, batch, rows) in zip(axes[:, 0], parts, strict=False):
        models = [model for model in NAMES if any(row["model"] == model for row in rows)]
        threads = sorted({row["threads"] for row in rows})
        width = 0.8 / max(1, len(threads))
        for number, count in enumerate(threads):
            ratios = {row["model"]: better_ratio(row) for row in rows if row["threads"] == count}
            places = [index + (number - (len(threads) - 1) / 2) * width for index in range(len(models))]
            axis.bar(places, [ratios.get(model) or 0 for model in models], width, label=_threads(count))
        axis.axhline(1, color="black", linewidth=0.8)
        axis.set_xticks(range(len(models)), models, rotation=30, ha="right")
        axis.set_ylabel(f"time ratio, {name},\nbatch {batch}", fontsize=8)
        axis.legend(loc="lower right")
    figure.suptitle("dagexec over the better of onnxruntime and OpenVINO (less is faster)")
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


if __name__ == "__main__":
    root = Path(__file__).parent.parent
    write_page(json.loads((root / "benchmarks" / "results" / "cnn.json").read_text()), root / "docs")
