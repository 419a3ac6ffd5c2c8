"""The part of docs/benchmarks.md about the models of six families, from the record that `models.py` writes.

It stands between the benchmarks of single things and the part that `cnn_page.py` writes.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cnn_measure import better_ratio
from environment import LIMITS
from families import FAMILIES

Row = Mapping[str, Any]

_TITLE = "# Models of six families"
_NEXT = "# Whole networks on the processor"
_OURS, ISLANDS = "dagexec", "dagexec with islands"
_PACKAGES = ("onnxruntime", "openvino", "numpy")
_WIDTH = 120
_PRECISIONS = ("float32", "bfloat16", "int8")
_WORST = 10
_COLUMNS = {
    "onnxruntime": "onnxruntime",
    "openvino": "OpenVINO",
    "torch eager": "torch",
    "torch compiled": "compiled",
    _OURS: "dagexec",
    "dagexec calibrated": "calibrated",
    "dagexec tuned": "tuned",
    ISLANDS: "islands",
}
"""Columns of the record to those of the tables; one that no row has is left out."""
TARGETS: Mapping[str, tuple[float, float]] = {
    "cnn_old": (0.75, 0.90),
    "cnn_modern": (0.90, 0.95),
    "encoder": (0.90, 0.95),
    "decoder": (1.0, 1.0),
    "recurrent": (0.90, 0.95),
}
"""The geometric mean of a family that is aimed at, with AVX-512 and with AVX2."""
WORST_TARGET, MEMORY_TARGET = 1.10, 1.2
_TITLES = {
    "cnn_old": "CNN, old",
    "cnn_modern": "CNN, modern",
    "dense": "detection and segmentation",
    "encoder": "transformer encoder",
    "decoder": "decoder with KV cache",
    "recurrent": "recurrent, audio",
}


def write_part(reports: Mapping[str, Any], document: Path) -> None:
    """Write the part into the page, whose other parts are kept."""
    text = document.read_text() if document.exists() else ""
    above, found, below = text.partition(_TITLE)
    if not found:
        above, found, below = text.partition(_NEXT)
        below = found + below
    else:
        below = _NEXT + below.partition(_NEXT)[2] if _NEXT in below else ""
    document.write_text("\n\n".join(filter(None, (above.rstrip(), part(reports).rstrip(), below.rstrip()))) + "\n")


def part(reports: Mapping[str, Any]) -> str:
    """The whole part: a section for each instruction set of a processor, AVX-512's first."""
    parts = [_HEAD]
    for name, report in sorted(reports.items(), key=lambda item: (not item[0].startswith("AVX512"), item[0])):
        parts += [f"## Families: {name}", _measured(report), *_families(name, report["rows"])]
        parts += [_table(way, rows) for way, rows in by_way(report["rows"]).items()]
        parts += [_first_results(report.get("first_results", {})), _profiles(report.get("profiles", {}))]
    return "\n\n".join(filter(None, parts)) + "\n"


def by_way(rows: Mapping[str, Mapping[str, Row]]) -> dict[str, dict[str, Row]]:
    """The rows of all models for each way of running them, in the order of precision, batch and threads."""
    ways = sorted({way for found in rows.values() for way in found}, key=_order)
    names = sorted(rows, key=lambda name: (FAMILIES.index(name.partition("/")[0]), name))
    return {way: {name: rows[name][way] for name in names if way in rows[name]} for way in ways}


def _order(way: str) -> tuple[int, str]:
    return _PRECISIONS.index(way.rpartition(", ")[2]), way


def _measured(report: Row) -> str:
    environment = report["environment"]
    commits = sorted(
        {row.get("commit") or "changed sources" for found in report["rows"].values() for row in found.values()}
    )
    versions = ", ".join(
        f"{package} {environment[package]}"
        for package in ("onnxruntime", "openvino", "numpy")
        if package in environment
    )
    limits = [f"`{limit}={environment[limit]}`" for limit in LIMITS if limit in environment]
    limited = f" {' and '.join(limits)} limit dagexec, NumPy, OpenVINO's products and convolutions, and PyTorch; "
    if "onnxruntime" in environment:
        limited += "onnxruntime was **not** limited, and used AVX-512."
    else:
        limited += "onnxruntime cannot be limited, and is left out: its AVX-512 is far ahead of AVX2 on this processor."
    limited = limited if limits else ""
    measured = f"{environment['processor']}, {environment['cores']} cores, Python {environment['python']}, {versions}"
    text = f"{measured}; dagexec at {', '.join(commits)}."
    return textwrap.fill(text + limited, _WIDTH, break_on_hyphens=False)


def _families(instructions: str, rows: Mapping[str, Mapping[str, Row]]) -> list[str]:
    """Geometric means of the ratio to the better peer by family and way, and how many models are beyond the limits."""
    ways = by_way(rows)
    if not ways:
        return []
    wide = instructions.startswith("AVX512")
    lines = [
        f"| family | models | target | {' | '.join(ways)} |",
        "|---|---|---|" + "---|" * len(ways),
    ]
    for family in FAMILIES:
        inside = [name for name in rows if name.startswith(f"{family}/")]
        if not inside:
            continue
        target = f"{TARGETS[family][0 if wide else 1]:.2f}" if family in TARGETS else ""
        means = [_mean(ratios({name: way[name] for name in inside if name in way})) for way in ways.values()]
        lines.append(f"| {_TITLES[family]} | {len(inside)} | {target} | {' | '.join(means)} |")
    lines.append(f"| all | {len(rows)} | | {' | '.join(_mean(ratios(way)) for way in ways.values())} |")
    islands = [_mean(ratios(way, ISLANDS)) for way in ways.values()]
    if any(islands):
        lines.append(f"| all, with islands | | | {' | '.join(islands)} |")
    beyond = [f"{sum(r > WORST_TARGET for r in ratios(way).values())} of {len(ratios(way))}" for way in ways.values()]
    lines.append(f"| slower than {WORST_TARGET:.2f} | | 0 | {' | '.join(beyond)} |")
    heavy = [_heavy(way) for way in ways.values()]
    lines.append(f"| more than {MEMORY_TARGET} times the memory | | 0 | {' | '.join(heavy)} |")
    lines.append(f"| refused or failed | | 0 | {' | '.join(str(_without_time(way)) for way in ways.values())} |")
    return ["\n".join(lines)]


def ratios(rows: Mapping[str, Row], column: str = _OURS) -> dict[str, float]:
    """The time of a column of dagexec over the better peer's, of the models that have both."""
    found = {name: _ratio(row, column) for name, row in rows.items()}
    return {name: ratio for name, ratio in found.items() if ratio is not None}


def _ratio(row: Row, column: str) -> float | None:
    """Ratios are kept as dagexec's time with its own kernels over another's."""
    own, other = better_ratio(row), 1.0 if column == _OURS else row["ratios"].get(column)
    return None if own is None or other is None else own / other


def _mean(found: Mapping[str, float]) -> str:
    if not found:
        return ""
    return f"**{math.exp(sum(map(math.log, found.values())) / len(found)):.2f}**"


def memory_ratio(row: Row) -> float | None:
    """dagexec's peak resident memory over the smaller of the peers'."""
    peaks = {name: entry["peak_mib"] for name, entry in row["contenders"].items() if "peak_mib" in entry}
    peers = [peaks[name] for name in ("onnxruntime", "openvino") if name in peaks]
    return peaks[_OURS] / min(peers) if peers and _OURS in peaks else None


def _heavy(rows: Mapping[str, Row]) -> str:
    found = [ratio for row in rows.values() if (ratio := memory_ratio(row)) is not None]
    return f"{sum(ratio > MEMORY_TARGET for ratio in found)} of {len(found)}"


def _without_time(rows: Mapping[str, Row]) -> int:
    return sum("ms" not in row["contenders"].get(_OURS, {}) for row in rows.values())


def _table(way: str, rows: Mapping[str, Row]) -> str:
    """Milliseconds of every contender, the ratio, and peak memory; a text where there is no time."""
    shown = [column for column in _COLUMNS if any(column in row["contenders"] for row in rows.values())]
    over = {_OURS: "over the better", ISLANDS: "islands over"}
    over = {column: text for column, text in over.items() if column in shown}
    head = [*(_COLUMNS[column] for column in shown), *over.values(), "MiB", "memory over"]
    lines = [f"### {way}", "", f"| model | {' | '.join(head)} |", "|---|" + "---|" * len(head)]
    for name, row in rows.items():
        entries = row["contenders"]
        memory = memory_ratio(row)
        cells = [
            name,
            *(_cell(entries.get(column)) for column in shown),
            *("" if (ratio := _ratio(row, column)) is None else f"**{ratio:.2f}**" for column in over),
            str(entries.get(_OURS, {}).get("peak_mib", "")),
            "" if memory is None else f"{memory:.2f}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    reasons = _reasons(rows)
    return "\n".join([*lines, *(["", *reasons] if reasons else [])])


def _reasons(rows: Mapping[str, Row]) -> list[str]:
    """Why contenders have no time, the start of what they say."""
    return [
        f"- {name}, {_COLUMNS[column]} {verdict}: {textwrap.shorten(entry[verdict], 150)}"
        for name, row in rows.items()
        for column, entry in row["contenders"].items()
        for verdict in ("refused", "failed")
        if verdict in entry
    ]


def _cell(entry: Row | None) -> str:
    if entry is None:
        return ""
    if "ms" in entry:
        return f"{entry['ms']:.3f}" if entry["ms"] < 1 else f"{entry['ms']:.2f}"
    return next((verdict for verdict in ("refused", "failed", "absent") if verdict in entry), "")


def _first_results(rows: Mapping[str, Row]) -> str:
    """Seconds to the first result, cold and warm."""
    if not rows:
        return ""
    peers = ("onnxruntime", "openvino", _OURS)
    lines = [
        "### Seconds to the first result",
        "",
        "Cold and warm: with nothing kept from earlier processes, and again.",
    ]
    lines += ["", f"| model | {' | '.join(_COLUMNS[peer] for peer in peers)} |", "|---|" + "---|" * len(peers)]
    for name, row in rows.items():
        cells = (_times(row["contenders"].get(peer, {})) for peer in peers)
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _times(entry: Row) -> str:
    return f"{entry['cold_s']:.2f}, {entry['warm_s']:.2f}" if "cold_s" in entry else "failed"


def _profiles(found: Mapping[str, Row]) -> str:
    """Where the time goes in the models furthest behind."""
    if not found:
        return ""
    lines = [
        "### Where the time goes",
        "",
        "The models furthest behind at batch 1 on one thread in float32: the kinds of operators that take most, with",
        "their engine, how many there are, their share of all operators, and rates by what the schemas count.",
        "",
        "| model | ms | operator | count | share | GFLOP/s | GB/s |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, row in list(found.items())[:_WORST]:
        for number, kind in enumerate(row["operators"][:5]):
            first = f"{name} | {row['ms']:.2f}" if number == 0 else " | "
            rates = f"{kind['gflop_s']:.1f} | {kind['gb_s']:.1f}"
            lines.append(f"| {first} | {kind['operator']} | {kind['count']} | {kind['share']:.0%} | {rates} |")
    return "\n".join(lines)


_HEAD = f"""{_TITLE}

Written by `python benchmarks/models.py --write-docs`; `make benchmark-models` makes the files and measures. All numbers
are in `benchmarks/results/models.json`, with the settings, compile times and memory of every contender.

- Models: forty-odd, at the sizes at which they are used, exported by PyTorch's older and newer exporter with random
  weights that are all in effect (batch normalization has statistics of a run; no bias, head or scale is zero), or
  carried by packages with trained weights. `benchmarks/families` makes them. Decoders write one token after 255 whose
  keys and values are given (`llama_prefill`: read 128); the batch axis, and where there are any, the axes of tokens are
  open in the files, and all contenders are told their sizes.
- dagexec is `compile(model)` with its own kernels and without measuring; *tuned* is with `tuning_seconds`, and
  *islands* may have parts computed by other runtimes, without the promises about rows of batches and NaN that those
  do not give either. onnxruntime, OpenVINO and PyTorch run at the fastest of a few settings.
- Each contender is a process of its own on the first 1 or 2 cores, and sleeps during the others' turns. A time is the
  median over interleaved rounds of a turn's median; a ratio is the median of dagexec's time over the better of
  onnxruntime's and OpenVINO's within a round. MiB: the peak resident memory of dagexec's process, and that over the
  smaller of the two peers'.
- A contender whose results differ from onnxruntime's by more than 1e-3 of an output's range is refused and has no time.
  In bfloat16 it may be 5e-2, and onnxruntime still computes in float32. In int8 all read the same file, which
  onnxruntime's tools have quantized, but for *calibrated*, dagexec's own int8 from the file in float32; the results are
  compared with those in float32, and may be 1.5 times as far off as onnxruntime's own, or 5e-2."""
