"""Weights and biases of layers, with Caffe2's names and fillers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dagexec.caffe2.model_helper import ModelHelper
from dagexec.caffe2.modeling.initializers import update_initializer
from dagexec.caffe2.modeling.parameter_info import ParameterTags
from dagexec.caffe2.references import BlobReference

Init = tuple[str, dict[str, Any]] | None
"""An operator that fills a parameter, and its arguments; None for the usual one."""

XAVIER: tuple[str, dict[str, Any]] = ("XavierFill", {})
ZERO: tuple[str, dict[str, Any]] = ("ConstantFill", {})


def weight(
    model: ModelHelper, blob_out: Any, shape: Sequence[int], weight_init: Init, initializer: Any
) -> BlobReference:
    """`<out>_w`, by default Xavier's."""
    made = update_initializer(initializer, weight_init, XAVIER)
    return model.create_param(blob_out + "_w", shape, made, tags=ParameterTags.WEIGHT)


def bias(model: ModelHelper, blob_out: Any, size: int, bias_init: Init, initializer: Any) -> BlobReference:
    """`<out>_b`, by default zeros."""
    made = update_initializer(initializer, bias_init, ZERO)
    return model.create_param(blob_out + "_b", [size], made, tags=ParameterTags.BIAS)
