"""Print and Summarize: what a tensor holds, as a line of the log `dagexec` at level INFO."""

from __future__ import annotations

import logging
from abc import abstractmethod

import numpy as np
import numpy.typing as npt

from dagexec.core import dtypes
from dagexec.core.dtypes import FLOAT_TYPES
from dagexec.core.gradient import no_gradient
from dagexec.core.operator import Operator, Step
from dagexec.core.registry import new_operator
from dagexec.core.schema import OperatorCall, TensorType
from dagexec.errors import ArgumentError
from dagexec.ops.base.blocks import Array

logger = logging.getLogger("dagexec")

MAX_PRINTED = 1000
TO_FILE = "1 asks Caffe2 for a file; dagexec writes to the log all the same, and says so once"


class Watcher(Operator):
    """Base of operators that tell of their input."""

    def prepare(self) -> Step:
        """The line, of memory that already exists."""
        self.warn_of_file()
        return self.telling(self.x(0))

    def warn_of_file(self) -> None:
        """Say where lines go when `to_file` asks for a file."""
        if self.arguments.bool("to_file"):
            logger.warning("%s: to_file=1 is ignored: lines go to the log 'dagexec', not to a file", self.label)

    @abstractmethod
    def telling(self, x: Array) -> Step:
        """A step that tells of array `x`, of the host."""


def infer_print(call: OperatorCall) -> list[TensorType]:
    """No outputs. Raises ArgumentError for a period or a limit below what makes sense."""
    for name, least in (("every_n", 1), ("limit", 0)):
        if call.arguments.int(name, least) < least:
            raise ArgumentError(f"{call.label}: argument {name!r} must be at least {least}")
    call.arguments.bool("to_file")
    return []


@new_operator(
    "Print",
    infer=infer_print,
    doc="Logs the type, the shape and the elements of X, in one line.",
    input_names=("X",),
    args={
        "every_n": "the first of so many runs is logged (default 1)",
        "limit": f"so many elements at most (default {MAX_PRINTED}, also for 0)",
        "to_file": TO_FILE,
    },
    effects=True,
)
class Print(Watcher):
    """A tensor in the log."""

    _runs = 0

    def telling(self, x: Array) -> Step:
        """One line of the log in every_n runs."""
        every, limit = self.arguments.int("every_n", 1), self.arguments.int("limit", 0) or MAX_PRINTED
        name, meta = self.input_blobs[0].name, dtypes.from_numpy(x.dtype)

        def tell() -> None:
            self._runs += 1
            if (self._runs - 1) % every:
                return
            shown = ", ".join(map(str, x.reshape(-1)[:limit]))
            more = f", ... ({x.size} in all)" if x.size > limit else ""
            logger.info("%s: blob %r is %s: %s%s", self.label, name, TensorType(x.shape, meta), shown, more)

        return tell


def infer_summarize(call: OperatorCall) -> list[TensorType]:
    """Four floats, where the output is requested."""
    meta = call.require_types(0, *FLOAT_TYPES)
    if not call.inputs[0].elements:
        raise call.fail("a tensor without elements has no minimum and no mean")
    call.arguments.bool("to_file")
    return [TensorType((4,), meta)] * len(call.definition.output)


@new_operator(
    "Summarize",
    outputs=(0, 1),
    infer=infer_summarize,
    doc=(
        "Logs the minimum and the maximum of X, their mean, and their standard deviation: the root of the "
        "sum of squares of differences from the mean over the number of elements less one, 0 of one element. The "
        "output, if it is asked for, holds these four."
    ),
    input_names=("X",),
    output_names=("summary",),
    args={"to_file": TO_FILE},
    effects=True,
)
class Summarize(Watcher):
    """What describes the elements of a tensor."""

    def telling(self, x: Array) -> Step:
        """One line of the log, and the output."""
        name = self.input_blobs[0].name
        summary = self.y(0) if self.output_blobs else None

        def tell() -> None:
            found = summary_of(x)
            self.deliver(summary, found)
            values = "min {:g}, max {:g}, mean {:g}, std {:g}".format(*found)
            logger.info("%s: blob %r of %d elements: %s", self.label, name, x.size, values)

        return tell

    def deliver(self, summary: Array | None, found: npt.NDArray[np.float64]) -> None:
        """Put the numbers into the output."""
        if summary is not None:
            summary[...] = found


def summary_of(x: Array) -> npt.NDArray[np.float64]:
    """Minimum, maximum, mean and the standard deviation with one degree of freedom less, in float64."""
    wide = x.astype(np.float64)
    deviation = wide.std(ddof=1) if x.size > 1 else 0.0
    return np.array([wide.min(), wide.max(), wide.mean(), deviation])


no_gradient("Print", "Summarize")
