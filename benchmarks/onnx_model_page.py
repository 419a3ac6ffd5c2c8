"""docs/onnx-models.md, from the record that `onnx_models.py` writes.

python benchmarks/onnx_model_page.py        # again from benchmarks/results/onnx_models.json, without measuring
"""

from __future__ import annotations

import json
import math
import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]

RESULTS = Path(__file__).parent / "results" / "onnx_models.json"
_PEERS = ("onnxruntime", "openvino")
_VERDICTS = ("crashed", "failed", "differs", "refused", "unstable", "equal", "no reference")
"""From the worst."""
_WIDTH = 120
_HEAD = """# Models of exporters and packages

Written by `benchmarks/onnx_models.py`; `make benchmark-onnx` makes the files, measures and writes this page. All
numbers are in `benchmarks/results/onnx_models.json`.

- `language` (transformers), `vision` (torchvision) and `layers` are exported by PyTorch, with random weights and small
  sizes: *older* is its TorchScript exporter, *newer* the one of `torch.export` and onnxscript. *Dynamic* files have
  open axes, and every one is run with several shapes by one compiled net.
- `scikit` is scikit-learn through skl2onnx, `derived` what onnxruntime's tools quantize, convert to float16 and fuse,
  `packages` the files inside Python packages, with trained weights.
- Equal: every output of every run is within 1e-4 (absolute and relative) of onnxruntime's; where a file computes in
  8-bit integers, within 3% of the output's largest element, in float16 within 0.5%. Unstable: in such a file a number
  rounded the other way can change all that follow. It is not equal, but onnxruntime's own result moves at least half as
  far when one number of the input is one step away (of a float, four last places).
- Times are of one run of the first shape, medians over interleaved rounds, all contenders in one process on the first
  1 or 2 cores, with the defaults of each. A ratio is dagexec's time over the other's. Loading is the least of two, on
  one core, with tuning off. With two threads the peers' own threads still spin when dagexec's turn begins, and take
  a core from it.
- Adapter: the operators that run through onnxruntime or `onnx.reference`, of all that the compiled net has."""


def write_page(reports: Mapping[str, Mapping[str, Any]], folder: Path) -> None:
    """Write onnx-models.md into `folder`, from a report for each instruction set."""
    (folder / "onnx-models.md").write_text(page(reports))


def page(reports: Mapping[str, Mapping[str, Any]]) -> str:
    """The whole page: a part for each instruction set."""
    parts = [_HEAD]
    for name, report in sorted(reports.items()):
        parts += [_measured(name, report["environment"])]
        parts += [_summary(report["rows"]), _failures(report["rows"]), _table(report["rows"])]
    return "\n\n".join(part for part in parts if part) + "\n"


def _measured(name: str, environment: Row) -> str:
    versions = ", ".join(f"{peer} {environment[peer]}" for peer in ("numpy", *_PEERS) if peer in environment)
    text = (
        f"Processor: {environment['processor']}, {environment['cores']} cores, instruction set {name}. "
        f"Python {environment['python']}, {versions}."
    )
    return f"## {name}\n\n{textwrap.fill(text, _WIDTH, break_on_hyphens=False)}"


def _summary(by_threads: Mapping[str, Mapping[str, Row]]) -> str:
    """A line for each family: how many are equal, native, and how fast."""
    rows = _worst(by_threads)
    peers = [f"/ {peer}, {threads} thr." for threads in by_threads for peer in _PEERS]
    columns = ["family", "files", "equal", "unstable", "without adapter", "differ or fail", "refused"]
    columns += ["loading / onnxruntime's", *peers]
    lines = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    for family in (*sorted({_family(name) for name in rows}), "all"):
        names = {name for name in rows if family in (_family(name), "all")}
        cells = [family, *_counts([rows[name] for name in names])]
        cells += [_mean(_ratios(found, names, peer)) for found in by_threads.values() for peer in _PEERS]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines) + "\n\nRatios are geometric means."


def _counts(rows: Sequence[Row]) -> list[object]:
    verdicts = Counter(row["verdict"] for row in rows)
    native = sum(row.get("adapter") == 0 for row in rows)
    wrong = verdicts["differs"] + verdicts["failed"] + verdicts["crashed"]
    loads = [row["load_ms"]["dagexec"] / row["load_ms"]["onnxruntime"] for row in rows if "load_ms" in row]
    counted = len(rows) - verdicts["no reference"]
    return [counted, verdicts["equal"], verdicts["unstable"], native, wrong, verdicts["refused"], _mean(loads)]


def _ratios(rows: Mapping[str, Row], names: Iterable[str], peer: str) -> list[float]:
    found = [rows[name].get("ratios", {}) for name in names if name in rows]
    return [ratios[peer] for ratios in found if peer in ratios]


def _family(name: str) -> str:
    return name.partition("/")[0]


def _failures(by_threads: Mapping[str, Mapping[str, Row]]) -> str:
    rows = {name: row for name, row in _worst(by_threads).items() if row["verdict"] not in ("equal", "no reference")}
    if not rows:
        return ""
    lines = ["### What is not equal", "", "| model | | why |", "|---|---|---|"]
    for name, row in rows.items():
        why = textwrap.shorten(" ".join(str(row.get("detail", "")).split()), 200).replace("|", "\\|")
        lines.append(f"| {name} | {row['verdict']} | {why} |")
    return "\n".join(lines)


def _table(by_threads: Mapping[str, Mapping[str, Row]]) -> str:
    columns = [
        f"{what}, {threads} thr." for threads in by_threads for what in ("ms", *(f"/ {peer}" for peer in _PEERS))
    ]
    lines = [
        "### Every model",
        "",
        "| model | operators | adapter | time in it | loading, ms | / onnxruntime's | " + " | ".join(columns) + " |",
        "|---" * (6 + len(columns)) + "|",
    ]
    for name, row in _worst(by_threads).items():
        if "operators" not in row:
            continue
        share = f"{row['adapter_time']:.0%}" if row["adapter"] else ""
        cells = [name, row["operators"], row["adapter"] or "", share, *_load_cells(row)]
        for found in by_threads.values():
            times = found.get(name, {})
            cells.append(f"{times['ms']['dagexec']:.3f}" if "ms" in times else "")
            cells += [f"{times['ratios'][peer]:.2f}" if peer in times.get("ratios", {}) else "" for peer in _PEERS]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def _load_cells(row: Row) -> list[str]:
    if "load_ms" not in row:
        return ["", ""]
    loads = row["load_ms"]
    return [f"{loads['dagexec']:.1f}", f"{loads['dagexec'] / loads['onnxruntime']:.2f}"]


def _worst(by_threads: Mapping[str, Mapping[str, Row]]) -> dict[str, Row]:
    """One row for each model: the first of those with the worst verdict."""
    rows: dict[str, Row] = {}
    for found in by_threads.values():
        for name, row in found.items():
            if name not in rows or _VERDICTS.index(row["verdict"]) < _VERDICTS.index(rows[name]["verdict"]):
                rows[name] = row
    return dict(sorted(rows.items()))


def _mean(values: Iterable[float]) -> str:
    """The geometric mean, or nothing without values."""
    found: Sequence[float] = list(values)
    return f"{math.exp(sum(map(math.log, found)) / len(found)):.2f}" if found else ""


if __name__ == "__main__":
    write_page(json.loads(RESULTS.read_text()), Path(__file__).parents[1] / "docs")
