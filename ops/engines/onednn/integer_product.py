"""Products of 8-bit integers with constant ones on panels of float32, for processors that sum no bytes exactly.

A sum whose terms' magnitudes add up to no more than 2^24 is exact in float32, in any order. Integers are widened before
the product; their zero point times the sum of a unit's weights is its bias.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from dagexec.core.operator import Step
from dagexec.ops.engines.onednn.descriptors import Array
from dagexec.ops.engines.onednn.operator import OneDNNOperator
from dagexec.ops.engines.onednn.packing import Making, packed_form
from dagexec.ops.engines.onednn.panel_product import pack_panels, panel_bytes, product_step
from dagexec.ops.families.quantized.accumulation import Operand
from dagexec.ops.kernels.conversions import convert_step

EXACT = 1 << 24
"""The largest magnitude up to which float32 has all integers."""

_LARGEST_BYTE = 255
"""The largest magnitude of X's integers, and of these less their zero point."""


def byte_products(
    owner: OneDNNOperator, x: Array, weights: Operand, zero: int | Array, *, is_turned: bool
) -> tuple[Array, list[Step]] | None:
    """(X - zero) W^T in float32, and the steps that compute it, of bytes [rows, inner] and [units, inner].

    W lies as [inner, units] if it `is_turned`; `zero` may be an array of one element, which a run fills. None where W
    may change, a sum might not be exact, or no kernels run.
    """
    constant, machine = weights.constant, owner.onednn.machine
    if constant is None or not machine.can_run or not x.size:
        return None

    def by_unit() -> Array:
        wide = weights.wide(np.dtype(np.float32))
        return wide.T if is_turned else wide

    def largest() -> float:
        return float(np.abs(by_unit()).sum(1, dtype=np.float64).max(initial=0))

    turned = str(is_turned)
    if _LARGEST_BYTE * constant.derived((*weights.key("largest sum"), turned), largest) > EXACT:
        return None
    sums: Array = constant.derived((*weights.key("sums"), turned), lambda: by_unit().sum(1, dtype=np.float32))
    units, (rows, inner), lanes = len(sums), x.shape, machine.lanes
    if not units:
        return None

    def fill(packed: Array) -> None:
        pack_panels(np.ascontiguousarray(by_unit()), lanes, packed)

    form = " ".join((*weights.key("integers"), turned, f"{units} x {inner}"))
    panels = packed_form(constant, form, Making(f"panels of {lanes}", panel_bytes(units, inner, lanes), fill))
    bias = owner.scratch((units,), np.float32)
    wide, result = (_floats(owner, *shape) for shape in ((rows, inner), (rows, units)))
    step = product_step(wide, panels.view(np.float32), bias, result, None, owner.label, lanes)
    if step is None:
        return None
    steps = [convert_step(machine, x, wide, owner.label) or partial(np.copyto, wide, x, casting="unsafe"), step]
    if isinstance(zero, int):
        np.multiply(sums, np.float32(-zero), out=bias)
        return result, steps
    return result, [partial(_fetch, sums, zero, bias), *steps]


def _floats(owner: OneDNNOperator, *shape: int) -> Array:
    return owner.working_memory(4 * int(np.prod(shape))).view(np.float32).reshape(shape)


def _fetch(sums: Array, zero: Array, bias: Array) -> None:
    """bias = -zero * sums."""
    np.multiply(sums, -zero.astype(np.float32).reshape(()), out=bias)
