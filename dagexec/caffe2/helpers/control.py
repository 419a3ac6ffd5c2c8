"""Layers that run other models: `brew.cond` and `brew.loop`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from dagexec.caffe2.control_ops_util import add_if_op, add_while_op
from dagexec.caffe2.model_helper import ModelHelper


def cond(
    model: ModelHelper,
    cond_blob: Any,
    external_blobs: Iterable[Any],
    then_model: ModelHelper,
    else_model: ModelHelper | None = None,
) -> None:
    """Run the net of one model or of the other; `external_blobs` are those of `model` that they may write."""
    add_if_op(model.net, cond_blob, external_blobs, then_model.net, None if else_model is None else else_model.net)


def loop(
    model: ModelHelper,
    cond_blob: Any,
    external_blobs: Iterable[Any],
    loop_model: ModelHelper,
    cond_model: ModelHelper | None = None,
) -> None:
    """Run the net of a model while `cond_blob` is true, which that of `cond_model` computes before each turn."""
    add_while_op(model.net, cond_blob, external_blobs, loop_model.net, None if cond_model is None else cond_model.net)
