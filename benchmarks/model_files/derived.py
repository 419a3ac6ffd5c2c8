"""What onnxruntime's own tools write from files of the other families: quantized, float16, and with fused operators.

Quantization follows the tools' defaults, dynamic (integers inside, ranges from each run) and static (ranges from
calibration), the latter both as QDQ and as operators on integers.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import onnx
from onnxruntime import quantization
from onnxruntime.transformers import float16, optimizer

from model_files.recipe import Feeds, Recipe, model_file, stored_feeds

FAMILY = "derived"

_IMAGES = ("vision/resnet18.older.dynamic", "vision/mobilenet_v2.older.dynamic")
_LANGUAGE = ("language/bert.older.dynamic", "language/gpt2.older.dynamic", "layers/lstm.older.dynamic")


def recipes() -> list[Recipe]:
    """They read the files that they are derived from, which have to be made before."""
    made: dict[str, tuple[str, Callable[[Path, Path], None]]] = {}
    for source in _IMAGES:
        made[f"{source}.qdq"] = source, partial(static, quantization.QuantFormat.QDQ)
        made[f"{source}.qoperator"] = source, partial(static, quantization.QuantFormat.QOperator)
    for source in (*_IMAGES, *_LANGUAGE):
        made[f"{source}.dynamic_int8"] = source, dynamic
    for source in ("vision/resnet18.older.dynamic", "language/bert.older.dynamic"):
        made[f"{source}.float16"] = source, _half
    for source, kind in (("language/bert.older.dynamic", "bert"), ("language/gpt2.older.dynamic", "gpt2")):
        made[f"{source}.fused"] = source, partial(_fused, kind)
    return [
        Recipe(f"{FAMILY}/{Path(name).name}", partial(_write, source, convert))
        for name, (source, convert) in made.items()
    ]


def _write(source: str, convert: Callable[[Path, Path], None], file: Path) -> Sequence[Feeds]:
    convert(model_file(file.parent.parent, source), file)
    return list(stored_feeds(file.parent.parent, source))


class _Calibration(quantization.CalibrationDataReader):  # type: ignore[misc, unused-ignore]
    """The feeds that are stored beside a model."""

    def __init__(self, model: Path) -> None:
        self._feeds: Iterator[Feeds] = stored_feeds(model.parent, model.name.removesuffix(".onnx"))

    def get_next(self) -> Feeds | None:
        return next(self._feeds, None)


def static(layout: Any, model: Path, file: Path) -> None:
    """8-bit integers by ranges from the feeds that are stored beside the model."""
    calibration = _Calibration(model)
    with tempfile.TemporaryDirectory() as folder:
        inferred = os.path.join(folder, "inferred.onnx")
        quantization.quant_pre_process(os.fspath(model), inferred, skip_symbolic_shape=True)
        quantization.quantize_static(inferred, os.fspath(file), calibration, quant_format=layout)


def dynamic(model: Path, file: Path, operators: Sequence[str] = ()) -> None:
    """8-bit weights, of these operators or of all that can have them; ranges of other inputs are taken in each run."""
    quantization.quantize_dynamic(
        os.fspath(model),
        os.fspath(file),
        op_types_to_quantize=list(operators) or None,
        weight_type=quantization.QuantType.QUInt8,
    )


def _half(model: Path, file: Path) -> None:
    onnx.save(float16.convert_float_to_float16(onnx.load(model), keep_io_types=True), file)


def _fused(kind: str, model: Path, file: Path) -> None:
    optimizer.optimize_model(os.fspath(model), kind, num_heads=4, hidden_size=32).save_model_to_file(os.fspath(file))
