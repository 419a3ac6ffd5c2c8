"""Kernels of our own on images with channels last, for images of any order: copies turn the others."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from dagexec.core.dtypes import FLOAT32
from dagexec.core.operator import Step, in_sequence
from dagexec.errors import UnsupportedFeatureError
from dagexec.ops.base.layout import NCHW, NHWC
from dagexec.ops.engines.onednn.descriptors import Array
from dagexec.ops.engines.onednn.operator import OneDNNOperator
from dagexec.ops.kernels.copies import copy_step


def channels_last_step(operator: OneDNNOperator, order: str, make: Callable[[Array, Array], Step | None]) -> Step:
    """What `make` gives for input 0 and output 0 of an operator, images in `order`, with channels as the last axis.

    Raises UnsupportedFeatureError where that is None, and for types and orders that are not for it.
    """
    x, y = operator.x(0), operator.y(0)
    if order not in (NCHW, NHWC) or operator.input(0).meta is not FLOAT32 or not x.size:
        raise UnsupportedFeatureError(f"{operator.label}: no kernel of our own computes it")
    operator.answer(lambda: True)
    if order == NHWC or x.ndim == 2:
        steps = [make(x, y)]
    else:
        turned = [_turned(operator, array) for array in (x, y)]
        machine, label = operator.onednn.machine, operator.label
        read = copy_step(machine, [(np.moveaxis(x, 1, -1), turned[0])], label)
        write = copy_step(machine, [(turned[1], np.moveaxis(y, 1, -1))], label)
        steps = [read, make(*turned), write]
    found = [step for step in steps if step is not None]
    if len(found) < len(steps):
        raise UnsupportedFeatureError(f"{operator.label}: no kernels run here")
    return in_sequence(found)


def _turned(operator: OneDNNOperator, array: Array) -> Array:
    """Working memory for an image, with channels last."""
    found: Array = operator.working_memory(array.nbytes).view(array.dtype)
    return found.reshape(np.moveaxis(array, 1, -1).shape)
