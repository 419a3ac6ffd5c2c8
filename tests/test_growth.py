"""What compiling a net and running it first takes grows with the number of its operators, not with the square.

Lines of Python are counted, not seconds: the numbers are the same on every machine. What C code does in one of these
lines - a sort, an operation on arrays - is not seen; `benchmarks/compile_time.py` shows times.
"""

from __future__ import annotations

import gc
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import CodeType, FrameType
from typing import Any

import numpy as np
import pytest

import dagexec
from dagexec.core import inferred_types
from dagexec.core.arguments import make_argument
from dagexec.core.dtypes import FLOAT32
from dagexec.core.model import InputInfo
from dagexec.core.proto import NetDef, OperatorDef
from dagexec.executor.source.loading import load_model
from dagexec.platform import cgroups, host_memory, system

OWN = os.path.dirname(dagexec.__file__)

COUNTS = (40, 80, 120)
READERS = {cgroups.__file__, host_memory.__file__, system.__file__}
"""Files that read what the system says, again and again as time goes by."""

LIMIT, SPARE = 1.4, 40
"""How many times what n more operators took, n further ones may take, for each line; 5/3 for pairs of operators."""

AN_OPERATOR = 1.2
"""How many times what an operator of fewer took, one of many may take: regions that are too large for a kernel take
less; 1.5 for pairs of operators."""


def operator(net: NetDef, kind: str, inputs: list[str], outputs: list[str], **arguments: Any) -> str:
    definition = OperatorDef(type=kind, input=inputs, output=outputs)
    definition.arg.extend(make_argument(name, value) for name, value in arguments.items())
    net.op.append(definition)
    return outputs[0]


def chain(net: NetDef, count: int) -> list[str]:
    """Nothing of it fuses."""
    last = "x"
    for number in range(count):
        kind, arguments = (("Softmax", {"axis": 0, "single_axis": 1}), ("Add", {}))[number % 2]
        last = operator(net, kind, [last, "c"][: 1 + number % 2], [f"b{number}"], **arguments)
    return [last]


def fusing(net: NetDef, count: int) -> list[str]:
    last = "x"
    for number in range(count):
        last = operator(net, ("Relu", "Add")[number % 2], [last, "c"][: 1 + number % 2], [f"b{number}"])
    return [last]


def fan_out(net: NetDef, count: int) -> list[str]:
    source = operator(net, "Softmax", ["x"], ["source"])
    return [operator(net, ("Softmax", "Relu")[number % 2], [source], [f"b{number}"]) for number in range(count)]


def fan_in(net: NetDef, count: int) -> list[str]:
    for number in range(count):
        operator(net, "Clip", ["x"], [f"b{number}"], min=0.001 * number)
    return [operator(net, "Sum", [f"b{number}" for number in range(count)], ["sum"])]


def joined(net: NetDef, count: int) -> list[str]:
    for number in range(count):
        operator(net, "Clip", ["x"], [f"b{number}"], min=0.001 * number)
    return [operator(net, "Concat", [f"b{number}" for number in range(count)], ["all", "sizes"], axis=1)]


def layered(net: NetDef, count: int) -> list[str]:
    width, last = 10, ["x"] * 10
    for layer in range(count // width):
        last = [
            operator(net, "Add", [last[place], last[(3 * place + layer) % width]], [f"b{layer}_{place}"])
            for place in range(width)
        ]
    return last


def modules(net: NetDef, count: int) -> list[str]:
    """Inception: branches of different length, again and again."""
    last = "x"
    for module in range(count // 7):
        ends = []
        for branch in range(3):
            end = last
            for step in range(branch + 1):
                end = operator(net, ("Softmax", "Sigmoid")[step % 2], [end], [f"m{module}_{branch}_{step}"])
            ends.append(end)
        last = operator(net, "Sum", ends, [f"m{module}"])
    return [last]


def overwriting(net: NetDef, count: int) -> list[str]:
    operator(net, "Softmax", ["x"], ["b"])
    for number in range(count - 1):
        operator(net, ("Relu", "Sigmoid")[number % 2], ["b"], ["b"])
    return ["b"]


def controlled(net: NetDef, count: int) -> list[str]:
    for number in range(count):
        operator(net, "Softmax", ["x"], [f"b{number}"])
        if number:
            net.op[number].control_input.append(f"b{number - 1}")
    return [f"b{number}" for number in range(count)]


SHAPES = (chain, fusing, fan_out, fan_in, joined, layered, modules, overwriting, controlled)


Lines = Counter[tuple[CodeType, int]]


@contextmanager
def counted_lines() -> Iterator[Lines]:
    """How often this thread runs each line within it, but for READERS and what ends objects of other tests."""
    found: Lines = Counter()

    def trace(frame: FrameType, event: str, _argument: object) -> Callable[..., Any] | None:
        if event == "line":
            found[frame.f_code, frame.f_lineno] += 1
        name = frame.f_code.co_filename
        return trace if name.startswith(OWN) and name not in READERS else None

    before = sys.gettrace()
    gc.disable()
    sys.settrace(trace)
    try:
        yield found
    finally:
        sys.settrace(before)
        gc.enable()


def lines_for(shape: Callable[[NetDef, int], list[str]], count: int, net_type: str, optimize: bool) -> Lines:
    """The lines that compiling a net and its first run take."""
    net = NetDef(name=shape.__name__, external_input=["x", "c"])
    net.external_output.extend(shape(net, count))
    array = np.linspace(-1, 1, 16, dtype=np.float32)[None]
    shapes = {"x": array.shape, "c": array.shape}
    known = {name: InputInfo(FLOAT32, shape) for name, shape in shapes.items()}
    model = replace(load_model(net), inputs=known)
    with counted_lines() as lines:
        executor = dagexec.compile(model, net_type=net_type, optimize=optimize)
        executor.run({"x": array, "c": array})
    executor.close()
    del executor
    gc.collect()  # oneDNN's primitives would be shared with the next net
    inferred_types._known.clear()  # so would answers
    return lines


@pytest.mark.slow
@pytest.mark.parametrize(("net_type", "optimize"), [("simple", False), ("dag", True)])
@pytest.mark.parametrize("shape", SHAPES)
def test_no_line_runs_more_than_so_many_times_an_operator(
    shape: Callable[[NetDef, int], list[str]], net_type: str, optimize: bool
) -> None:
    lines_for(shape, 10, net_type, optimize)  # what is done once a process
    few, more, most = (lines_for(shape, count, net_type, optimize) for count in COUNTS)
    growing = {
        f"{code.co_filename}:{number} in {code.co_name}": (few[code, number], more[code, number], times)
        for (code, number), times in most.items()
        if times - more[code, number] > LIMIT * (more[code, number] - few[code, number]) + SPARE
        and times / COUNTS[2] > AN_OPERATOR * max(more[code, number] / COUNTS[1], few[code, number] / COUNTS[0])
    }
    assert not growing
