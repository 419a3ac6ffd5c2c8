"""What Caffe2 computed in its own operator tests, read from `tests/fixtures/caffe2_operators`.

That folder's README gives the format of the recordings; `tests.caffe2_replay` runs them in dagexec.
"""

from __future__ import annotations

import base64
import json
import lzma
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dagexec import NetDef, OperatorDef

Array = npt.NDArray[Any]
Arrays = Mapping[str, Array]

FOLDER = Path(__file__).parent / "fixtures" / "caffe2_operators"


@dataclass(frozen=True)
class GradientCase:
    """The gradient operators that Caffe2 made for an operator, and what they computed.

    Attributes:
        operators: what Caffe2's maker made.
        inputs: for each input of the forward operator the blobs of its gradient: one, two of a sparse one (indices and
            values), or none.
        given: for each output of the forward operator, whether its gradient was there.
        output_gradients, values: the gradients of the outputs, and those computed.
        refused: Caffe2 did not run these operators.
    """

    operators: tuple[OperatorDef, ...]
    inputs: tuple[tuple[str, ...], ...]
    given: tuple[bool, ...]
    output_gradients: Arrays
    values: Arrays
    refused: bool


@dataclass(frozen=True)
class Case:
    """One recording.

    Attributes:
        name: its number in the file, and the operator type (`net` for one of several operators).
        net: what ran; of one operator unless `is_net`.
        inputs, outputs: the blobs before and after.
        needs_objects: an input is no tensor, so that the recording lacks it.
        refused: Caffe2 raised an error.
        unstable: outputs that differ from run to run: only their types and shapes count.
    """

    name: str
    net: NetDef
    is_net: bool
    inputs: Arrays
    outputs: Arrays
    needs_objects: bool
    refused: bool
    unstable: frozenset[str]
    gradients: tuple[GradientCase, ...]

    @property
    def types(self) -> list[str]:
        """The operator types of the net and of its gradients, sorted."""
        made = (definition.type for gradient in self.gradients for definition in gradient.operators)
        return sorted({definition.type for definition in self.net.op}.union(made))


@cache
def recorded_cases() -> tuple[Case, ...]:
    """All cases, in the order of the file."""
    with lzma.open(FOLDER / "cases.jsonl.xz", "rt") as lines:
        return tuple(_case(number, json.loads(line)) for number, line in enumerate(lines))


def _case(number: int, record: dict[str, Any]) -> Case:
    message = base64.b64decode(record["proto"])
    is_net = record["kind"] == "net"
    net = NetDef.FromString(message) if is_net else NetDef(name="case", op=[OperatorDef.FromString(message)])
    return Case(
        name=f"{number:04}-{'net' if is_net else net.op[0].type}",
        net=net,
        is_net=is_net,
        inputs=_arrays(record["inputs"]),
        outputs=_arrays(record["outputs"]),
        needs_objects=bool(record["opaque"] or record["missing"]),
        refused=record["error"] is not None,
        unstable=frozenset(record["unstable"]),
        gradients=tuple(map(_gradient, record["gradients"])),
    )


def _gradient(record: dict[str, Any]) -> GradientCase:
    return GradientCase(
        operators=tuple(OperatorDef.FromString(base64.b64decode(made)) for made in record["ops"] or ()),
        inputs=tuple(tuple(names or ()) for names in record["inputs"]),
        given=tuple(record["given"]),
        output_gradients=_arrays(record["dy"] or {}),
        values=_arrays(record["values"] or {}),
        refused=record["error"] is not None,
    )


def _arrays(record: Mapping[str, Sequence[Any]]) -> dict[str, Array]:
    return {name: _array(*value) for name, value in record.items()}


def _array(dtype: str, shape: list[int], content: str | list[str]) -> Array:
    if dtype == "str":
        strings = np.empty(math.prod(shape), object)
        strings[:] = [base64.b64decode(text) for text in content]
        return strings.reshape(shape)
    assert isinstance(content, str)
    return np.frombuffer(base64.b64decode(content), dtype).reshape(shape)
