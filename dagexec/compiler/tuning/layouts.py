"""The layout of a net's images: by rule from its convolutions, or by measurement.

Measured, the whole net is run in each layout, and the fastest is kept. The rule weighs the work of each kind of
convolution by what blocks of channels save there, as measured on whole networks: one tap and the
library's Winograd want blocks, our own Winograd and grouped convolutions and wide windows NHWC.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

from dagexec.compiler.tuning.bench import Array, Measures
from dagexec.compiler.tuning.runner import Trial
from dagexec.core.dtypes import from_numpy
from dagexec.core.inference import infer_listed
from dagexec.core.model import Model
from dagexec.core.node import Node
from dagexec.core.program import Program
from dagexec.core.registry import schema_of
from dagexec.core.schema import TensorType
from dagexec.core.traits import ImageRole
from dagexec.errors import DagexecError
from dagexec.ops.base.layout import NCHW8C, NCHW16C, NHWC
from dagexec.ops.engines.onednn.availability import widest_blocks
from dagexec.ops.engines.onednn.binding import library
from dagexec.ops.engines.onednn.winograd import is_available
from dagexec.platform.deadline import Deadline

logger = logging.getLogger("dagexec")

ONE_TAP, SQUARE, DEPTHWISE, GROUPED, OTHER = "one tap", "3x3, stride 1", "depthwise", "grouped", "other"

_FACTORS: Mapping[str, Mapping[str, float]] = {
    NCHW16C: {ONE_TAP: 0.95, SQUARE: 0.93, GROUPED: 1.05},
    NCHW8C: {ONE_TAP: 0.96, SQUARE: 1.03, DEPTHWISE: 0.90, GROUPED: 1.17, OTHER: 1.10},
}
"""By kind of convolution, the time it takes in blocks over that in NHWC, fitted to twelve networks (docs/tuning.md)."""

_BESIDE_OWN_KERNELS = {
    NCHW16C: {SQUARE: 1.07, DEPTHWISE: 1.60, GROUPED: 1.60},
    NCHW8C: {SQUARE: 1.60, DEPTHWISE: 1.60, GROUPED: 1.60},
}
"""The same where machine code of our own computes in NHWC (`ops/engines/onednn/winograd.py`,
`ops/engines/onednn/direct.py`)."""

_MIN_FILTERS = 64  # with fewer, Winograd's transforms of the image cost what they save

_GAIN = 0.98  # a later layout must take at most this part of the time of an earlier one: measured times vary


def fastest_layout(
    names: Sequence[str],
    laid_out: Callable[[str], Model],
    measures: Measures,
    seconds: float,
    deadline: Deadline,
) -> str | None:
    """Which of `names` makes a run fastest; None when the net runs in none. The first is kept unless one gains enough.

    `laid_out` gives the net in a layout, which one thread runs. Layouts that give the same net are run once. Nets
    that could not be made before `deadline`, to judge by how long the one before took, are left out.
    """
    trials: dict[bytes, tuple[str, Trial]] = {}
    took = 0.0
    for name in names:
        left = deadline.left()
        if trials and left < took:
            break
        model = laid_out(name)
        took = left - deadline.left()
        trials.setdefault(fingerprint(model.program), (name, Trial(model)))
    times = measures.run_seconds([one for _, one in trials.values()], seconds)
    measured = dict(zip((name for name, _ in trials.values()), times, strict=True))
    logger.info("layouts: %s", ", ".join(f"{name} {time * 1e3:.3f} ms" for name, time in measured.items()))
    best = None
    for name, time in measured.items():
        if math.isfinite(time) and (best is None or time < _GAIN * measured[best]):
            best = name
    return best


def estimated_layout(model: Model, inputs: Mapping[str, Array] | None) -> str:
    """The layout that `model` is expected to be fastest in at the shapes of `inputs`; NHWC where they are not known."""
    blocked = widest_blocks()
    if blocked is None or inputs is None or not any(map(_is_convolution, model.program.op)):
        return NHWC
    factors = _factors(blocked)
    before = after = 0.0
    for kind, flops in _convolutions(model, inputs):
        before += flops
        after += flops * factors.get(kind, 1.0)
    return blocked if after < _GAIN * before else NHWC


def _factors(blocked: str) -> Mapping[str, float]:
    found = library()
    if found is None or not is_available(found):
        return _FACTORS[blocked]
    return {**_FACTORS[blocked], **_BESIDE_OWN_KERNELS[blocked]}


def _convolutions(model: Model, inputs: Mapping[str, Array]) -> Iterator[tuple[str, int]]:
    """Kind and work of each convolution, as far as shapes can be inferred."""
    arrays = {**model.parameters, **inputs}
    types = {name: TensorType(array.shape, from_numpy(array.dtype)) for name, array in arrays.items()}
    try:
        costs = infer_listed(model.program.name, model.program.op, types, model.parameters).costs
    except DagexecError:
        return
    for definition, cost in zip(model.program.op, costs, strict=True):
        if cost is not None and _is_convolution(definition) and definition.input[1] in model.parameters:
            yield _kind(definition, model.parameters[definition.input[1]].shape), cost.flops


def _is_convolution(definition: Node) -> bool:
    return schema_of(definition.type).image_role is ImageRole.CONVOLUTION


def _kind(definition: Node, filters: tuple[int, ...]) -> str:
    """What decides about layouts: the window, its stride, and groups. `filters` is M, C/G, kernel."""
    arguments = definition.arguments()
    if arguments.int("group", 1) > 1:
        return DEPTHWISE if filters[1] == 1 else GROUPED
    strides = {arguments.int(name, 1) for name in ("stride", "stride_h", "stride_w")} | set(arguments.ints("strides"))
    if filters[2:] == (3, 3) and strides == {1} and filters[0] >= _MIN_FILTERS:
        return SQUARE
    return ONE_TAP if math.prod(filters[2:]) == 1 else OTHER


def fingerprint(net: Program) -> bytes:
    """Bytes that are the same for the same net."""
    return net.message().SerializeToString(deterministic=True)
