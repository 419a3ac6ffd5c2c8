"""The models of the benchmark in 8-bit integers, as onnxruntime's tools make them with their defaults.

Networks that have more convolutions than products get ranges from calibration with the stored feeds (QDQ), all others
dynamic quantization: what each kind is usually given.
"""

from __future__ import annotations

import logging
from collections import Counter
from pathlib import Path

import onnx
from model_files.derived import dynamic, static
from onnxruntime import quantization

_PRODUCTS = ("MatMul", "Gemm", "LSTM")
"""The operators of other networks that get integers, beside the tables that they look up in (Gather)."""


def quantize(model: Path, file: Path) -> str:
    """Write `file`; returns how, or why not."""
    counts = Counter(node.op_type for node in onnx.load(model, load_external_data=False).graph.node)
    calibrated = counts["Conv"] > sum(counts[product] for product in _PRODUCTS)
    logging.disable(logging.WARNING)
    try:
        if calibrated:
            static(quantization.QuantFormat.QDQ, model, file)
        else:
            dynamic(model, file, (*_PRODUCTS, "Gather"))
    except Exception as error:
        file.unlink(missing_ok=True)
        return f"not possible: {error}"
    return "calibrated" if calibrated else "dynamic"
