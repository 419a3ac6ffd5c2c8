"""Updates whose step depends on the norm of many gradients: GFtrl, Wngrad and SparseWngrad."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from dagexec.core.dtypes import FLOAT32, INT32, INT64
from dagexec.core.gradient import no_gradient
from dagexec.core.schema import OperatorCall, TensorType
from dagexec.errors import ArgumentError
from dagexec.ops.base.array_function import array_function
from dagexec.ops.base.blocks import Array
from dagexec.ops.families.index.indexing import check_indices
from dagexec.ops.families.optimize.ftrl import FTRL_ARGS


def _in_place(source: int, target: int) -> bool:
    return source == target


def _argument(call: OperatorCall, name: str, default: float) -> float:
    """One that is not negative, and alpha not 0. Raises ArgumentError."""
    found = call.arguments.float(name, default)
    if not (math.isfinite(found) and (found > 0 or (found == 0 and name != "alpha"))):
        raise ArgumentError(f"{call.label}: {name!r} must not be negative, nor alpha 0; found {found}")
    return found


def infer_group_ftrl(call: OperatorCall) -> list[TensorType]:
    """As param and n_z."""
    call.require_types(0, FLOAT32)
    call.require_same_type()
    shape = call.inputs[0].shape
    if not shape:
        raise call.fail("a parameter must have rows, found a scalar")
    call.require_shape(1, (*shape, 2), "n and z of each element of param")
    call.require_shape(2, shape, "the shape of param")
    for name, default in (("alpha", 0.005), ("beta", 1.0), ("lambda1", 0.001), ("lambda2", 0.001)):
        _argument(call, name, default)
    return list(call.inputs[:2])


@array_function(
    "GFtrl",
    outputs=(2, 2),
    infer=infer_group_ftrl,
    doc="Ftrl that leaves a whole column of a matrix at 0, all that belongs to an input of a layer: n' = n + g^2; "
    "z' = z + g - (sqrt(n') - sqrt(n)) / alpha * param; param' = 0 where the norm s of the column's z' is no more than "
    "t = lambda1 sqrt(rows), else z' (t / s - 1) / ((beta + sqrt(n')) / alpha + lambda2).",
    input_names=("param", "n_z", "grad"),
    output_names=("param", "n_z"),
    args=FTRL_ARGS,
    inplace=_in_place,
)
def group_ftrl(call: OperatorCall, param: Array, state: Array, grad: Array) -> Sequence[Array]:
    """In float64."""
    alpha, beta = _argument(call, "alpha", 0.005), _argument(call, "beta", 1.0)
    g, before, z = (one.astype(np.float64) for one in (grad, state[..., 0], state[..., 1]))
    n = before + g * g
    root = np.sqrt(n)
    z = z + g - (root - np.sqrt(before)) / alpha * param
    norm = np.sqrt((z * z).sum(0, keepdims=True))
    least = _argument(call, "lambda1", 0.001) * math.sqrt(len(param))
    kept = norm > least
    divisor = (beta + root) / alpha + _argument(call, "lambda2", 0.001)
    shrunk = z * (least / np.where(kept, norm, 1) - 1)
    return [np.divide(shrunk, divisor, out=np.zeros_like(z), where=kept & (divisor > 0)), np.stack([n, z], -1)]


def _infer_wngrad(call: OperatorCall, grad: int) -> list[TensorType]:
    call.require_types(0, FLOAT32)
    call.require_same_type(0, 1, grad, grad + 1)
    for index in (1, grad + 1):
        if call.inputs[index].elements != 1:
            raise call.fail(f"input {call.definition.input[index]!r} must be one number")
    _argument(call, "epsilon", 1e-5)
    return list(call.inputs[:2])


def infer_wngrad(call: OperatorCall) -> list[TensorType]:
    """As param and seq_b."""
    call.require_shape(2, call.inputs[0].shape, "the shape of param")
    return _infer_wngrad(call, 2)


def infer_sparse_wngrad(call: OperatorCall) -> list[TensorType]:
    """As param and seq_b."""
    call.require_types(2, INT32, INT64)
    shape, indices = call.inputs[0].shape, call.inputs[2].shape
    if not shape:
        raise call.fail("a parameter must have rows, found a scalar")
    call.require_shape(3, (*indices, *shape[1:]), "a row for each index")
    return _infer_wngrad(call, 3)


_EPSILON = {"epsilon": "what is added to b where it divides, not negative (default 1e-5)"}
_WNGRAD = "param' = param + rate * g / (b + epsilon); b' = b + the sum of all g^2 / (b + epsilon)"


def _wngrad(call: OperatorCall, b: Array, grad: Array, rate: Array) -> tuple[Array, Array]:
    """The step of each element, and b'."""
    divisor = b.astype(np.float64) + _argument(call, "epsilon", 1e-5)
    g = grad.astype(np.float64)
    return rate.reshape(()) * g / divisor.reshape(()), b + (g * g).sum() / divisor


@array_function(
    "Wngrad",
    infer=infer_wngrad,
    doc=f"One rate for all elements: {_WNGRAD}. Wu et al., 2018, arXiv:1803.02865.",
    input_names=("param", "seq_b", "grad", "rate"),
    output_names=("param", "seq_b"),
    args=_EPSILON,
    inplace=_in_place,
)
def wngrad(call: OperatorCall, param: Array, b: Array, grad: Array, rate: Array) -> Sequence[Array]:
    """In float64."""
    step, after = _wngrad(call, b, grad, rate)
    return [param + step, after]


@array_function(
    "SparseWngrad",
    infer=infer_sparse_wngrad,
    doc=f"Wngrad of the rows that `indices` names: {_WNGRAD}.",
    input_names=("param", "seq_b", "indices", "grad", "rate"),
    output_names=("param", "seq_b"),
    args=_EPSILON,
    inplace=_in_place,
)
def sparse_wngrad(
    call: OperatorCall, param: Array, b: Array, indices: Array, grad: Array, rate: Array
) -> Sequence[Array]:
    """A row that is named twice gets both steps."""
    check_indices(indices, 0, len(param), call.label)
    step, after = _wngrad(call, b, grad, rate)
    result = param.astype(np.float64)
    np.add.at(result, indices, step)
    return [result, after]


no_gradient("GFtrl", "Wngrad", "SparseWngrad")
