"""Who takes part in `models.py`, and with which settings: dagexec, onnxruntime, OpenVINO and PyTorch, each at its best.

A column is a contender in one way of using it. Each tries a few settings, of which the fastest is measured.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import onnx
from cnn_measure import OURS, Options, settings
from cnn_peers import Task
from model_files.recipe import Feeds, model_file

from dagexec.options import CompileOptions

PRECISIONS = ("float32", "bfloat16", "int8")
TUNED, ISLANDS = "dagexec tuned", "dagexec with islands"
CALIBRATED = "dagexec calibrated"
EXACT = "exact"
"""No contender: onnxruntime in float32, whose results those in 8-bit integers are compared with."""
TORCH = {"torch eager": False, "torch compiled": True}
"""Columns of PyTorch, and whether they compile."""
_ISLANDS_OPTION = "islands"
_NO_CHOICES = {"DAGEXEC_CHOICES": "off"}
_NARROW_TORCH = {"ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}
"""PyTorch's own kernels and MKL's do not read oneDNN's limit."""


@dataclass(frozen=True)
class Case:
    """One model in one way of running it.

    Attributes:
        name: family/model.
        batch: rows of a run.
        threads: how many may compute.
        precision: one of PRECISIONS.
    """

    name: str
    batch: int
    threads: int
    precision: str = "float32"

    @property
    def way(self) -> str:
        """What is measured of the model."""
        return f"batch {self.batch}, {self.threads} thread{'s' if self.threads > 1 else ''}, {self.precision}"


@dataclass(frozen=True)
class Column:
    """A contender in one way of using it: the task for its process, and the settings to try."""

    task: Task
    settings: Sequence[Options]


def has_islands() -> bool:
    """Whether this dagexec can have other runtimes compute parts of a graph."""
    return _ISLANDS_OPTION in {option.name for option in fields(CompileOptions)}


def columns(folder: Path, case: Case, feeds: Feeds, *, torch: str = "", tuning: float = 0.0) -> dict[str, Column]:
    """The contenders of a case by their columns.

    `torch` is the interpreter for PyTorch, which is left out without one. With `tuning`, dagexec also takes part as it
    is after measuring for so many seconds: with its own kernels, and with islands where this dagexec has them. There
    it may, as the peers do, give a row other last bits in another batch, and lose a NaN.
    """
    source = model_file(folder, case.name)
    file = quantized_file(source) if case.precision == "int8" else source
    task = Task(file, dict(feeds), case.threads, _sizes(file, feeds))
    ours = replace(task, environment=_NO_CHOICES)
    own: dict[str, Any] = {"dtype": case.precision} if case.precision == "bfloat16" else {}
    plain = own | ({_ISLANDS_OPTION: "none"} if has_islands() else {})
    found = {OURS: Column(ours, (plain,))}
    if tuning:
        found[TUNED] = Column(ours, (plain | {"tuning_seconds": tuning},))
    if tuning and has_islands():
        free = {_ISLANDS_OPTION: "auto", "tuning_seconds": tuning, "batch_invariant": False, "nan": "any"}
        found[ISLANDS] = Column(ours, (own | free,))
    if case.precision == "int8":
        calibrated = {**plain, "dtype": "int8", "calibration": [dict(feeds)]}
        found[CALIBRATED] = Column(replace(ours, model=source), (calibrated,))
        found[EXACT] = Column(replace(task, model=source), ({},))
    peers = settings(case.threads, torch=False)
    found["onnxruntime"] = Column(task, peers["onnxruntime"])
    hint = {"INFERENCE_PRECISION_HINT": "bf16"} if case.precision == "bfloat16" else {}
    found["openvino"] = Column(task, [dict(options) | hint for options in peers["openvino"]])
    if torch and case.precision != "int8":
        found |= _torch_columns(replace(task, python=torch), case)
    return found


def _torch_columns(task: Task, case: Case) -> dict[str, Column]:
    given = replace(task, environment=_NARROW_TORCH if os.environ.get("ONEDNN_MAX_CPU_ISA") == "AVX2" else {})
    options = {"net": case.name, "precision": case.precision}
    images = case.name.startswith(("cnn", "dense"))
    return {
        column: Column(
            given,
            [
                options | ({"inductor": True} if compiled else {}) | ({"channels_last": True} if last else {})
                for last in ((False, True) if images else (False,))
            ],
        )
        for column, compiled in TORCH.items()
    }


def quantized_file(model: Path) -> Path:
    """Where a model is kept that computes in 8-bit integers."""
    return model.with_suffix(".int8.onnx")


def _sizes(file: Path, feeds: Feeds) -> Mapping[str, int]:
    """The sizes of the axes that the model's inputs only name."""
    if not file.exists():
        return {}
    graph = onnx.load(os.fspath(file), load_external_data=False).graph
    return {
        axis.dim_param: size
        for value in graph.input
        if value.name in feeds
        for axis, size in zip(value.type.tensor_type.shape.dim, feeds[value.name].shape, strict=True)
        if axis.dim_param
    }
