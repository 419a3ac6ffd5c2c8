"""DAGEXEC_TRACE=1: every run of every net prints one line an operator to standard error.

    net[index]  type  outputs  worker or stream  milliseconds  GFLOP/s  GB/s

The rates are those that the operator reached, by the operations and bytes of its schema's `cost`; blank without one. An
operator on a device is printed when its kernel has run, with the stream and the device's time; its failures are in the
last line of a failed run, `net  run failed: ...`. The variable is read when a net is made; without it a run pays
nothing.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from dagexec.core.operator import Operator
from dagexec.core.schema import Cost, TensorType
from dagexec.core.tensor import Tensor
from dagexec.platform.lazy import LazyModule
from dagexec.scheduler.observe.observers import Observer

if not TYPE_CHECKING:
    observed_run = LazyModule("dagexec.scheduler.observe.observed_run")
else:
    from dagexec.core.stream import Kernel, Stream
    from dagexec.scheduler.observe import observed_run
    from dagexec.scheduler.observe.observed_run import ObservedRun

VARIABLE = "DAGEXEC_TRACE"


def line_observer() -> LineObserver | None:
    """A `LineObserver` if the environment asks for lines: DAGEXEC_TRACE is set, and neither empty nor 0."""
    return LineObserver() if os.environ.get(VARIABLE, "0") not in ("", "0") else None


class LineObserver(Observer):
    """Prints a line for each operator, to the current `sys.stderr`."""

    def __init__(self) -> None:
        self._under_way = observed_run.RunsUnderWay()

    def run_started(self, run: ObservedRun) -> None:
        """Kernels may be of this run from now on."""
        self._under_way.add(run)

    def run_stopped(self, run: ObservedRun, end: int, error: BaseException | None) -> None:
        """Forget the run, and print the error of one that failed, on one line."""
        self._under_way.remove(run)
        if error is not None:
            message = " ".join(f"{type(error).__name__}: {error}".split())
            sys.stderr.write(f"{run.graph.name}  run failed: {message}\n")

    def operator_stopped(
        self, run: ObservedRun, operator: int, worker: str, start: int, end: int, error: BaseException | None
    ) -> None:
        """Print the operator, unless this was only its launch."""
        if error is not None or run.graph.device(operator).kind == "cpu":
            _print(run, operator, worker, (end - start) / 1e9, error)

    def executed(self, stream: Stream, kernel: Kernel, start: float, end: float) -> None:
        """Print the operator whose kernel this is."""
        found = self._under_way.find(kernel)
        if found is not None:
            _print(*found, stream.name, end - start, None)


def _print(run: ObservedRun, index: int, where: str, seconds: float, error: BaseException | None) -> None:
    """One write a line, so that lines of several workers do not mix."""
    sys.stderr.write(operator_line(run, index, where, seconds, error) + "\n")


def operator_line(run: ObservedRun, index: int, where: str, seconds: float, error: BaseException | None = None) -> str:
    """The line of operator `index`, which took `seconds` on `where` (a worker or a stream)."""
    definition = run.graph.operators[index]
    position = f"{run.graph.name}[{index}]"
    name = definition.name or ",".join(definition.output)
    line = f"{position:<16} {definition.type:<18} {name:<28} {where:<22} {seconds * 1e3:9.3f} ms"
    if error is not None:
        return f"{line}  failed: {type(error).__name__}"
    cost = operator_cost(run.operators[index])
    if cost is None or seconds <= 0:
        return line
    rates = ((cost.flops, "GFLOP/s"), (cost.bytes_read + cost.bytes_written, "GB/s"))
    shown = (f"{amount / seconds / 1e9:9.2f} {unit}" if amount else " " * (10 + len(unit)) for amount, unit in rates)
    return f"{line} {' '.join(shown)}".rstrip()


def operator_cost(operator: Operator) -> Cost | None:
    """The cost of `operator` for the shapes its tensors have now; None where that cannot be told."""
    try:
        types = [_type(blob.value) for blob in operator.output_blobs]
        return operator.schema.cost(operator.call(), types)
    except Exception:  # the cost functions take for granted what inference has checked, which an operator may lack
        return None


def _type(tensor: object) -> TensorType:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{type(tensor).__name__} has no type")
    return TensorType(tensor.shape, tensor.meta)
