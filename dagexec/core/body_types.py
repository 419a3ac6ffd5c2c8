"""Types around bodies: what an operator that runs nets (`dagexec.core.body`) gives them, and what it results in.

Only a run can tell these for certain, so that preparation does not use them. Passes and `inspect` do: where the schema
says what follows from the types of its inputs (`OpSchema.infer_bodies`), that is so in every run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy.typing as npt

from dagexec.core.node import Node
from dagexec.core.program import Program
from dagexec.core.registry import schema_of, sub_nets_of
from dagexec.core.schema import BodyCall, BodyTypes, TensorType
from dagexec.errors import SchemaError
from dagexec.platform.records import dataclass

Array = npt.NDArray[Any]
Types = Sequence[TensorType | None]


@dataclass(frozen=True)
class Seen:
    """What is known of blobs: types, and contents of those that are constant."""

    types: Types
    contents: Sequence[Array | None]


InferNet = Callable[[Program, Mapping[str, tuple[TensorType | None, Array | None]]], Types]
"""Types of a net's `external_output` from what is known of its `external_input`, by name."""


def types_with_bodies(definition: Node, inputs: Seen, infer_net: InferNet) -> BodyTypes | None:
    """What is known of the outputs of an operator and of what it gives its bodies; None of one without bodies.

    Raises SchemaError for bodies that do not fit, and what `infer_net` raises.
    """
    schema = schema_of(definition.type)
    if schema.infer_bodies is None:
        return None
    arguments = definition.arguments()
    names = arguments.strings("captured")
    own = len(inputs.types) - len(names)
    if own < 0:
        raise SchemaError(f"{definition.type}: {len(names)} captured names, but only {len(inputs.types)} inputs")
    captured = dict(zip(names, zip(inputs.types[own:], inputs.contents[own:], strict=True), strict=True))
    nets = sub_nets_of(definition, schema)

    def results(argument: str, kinds: Types) -> Types:
        formal = [name for name in nets[argument].external_input if name not in captured] if argument in nets else []
        if argument not in nets or len(formal) != len(kinds):
            raise SchemaError(f"{definition.type}: {argument} takes {len(formal)} values, and is given {len(kinds)}")
        known = {name: (kind, None) for name, kind in zip(formal, kinds, strict=True)}
        return infer_net(nets[argument], captured | known)

    types, contents = tuple(inputs.types[:own]), tuple(inputs.contents[:own])
    answer = schema.infer_bodies(BodyCall(definition, arguments, types, contents, results))
    missing = (None,) * len(definition.output)
    return replace(answer, outputs=(*answer.outputs, *missing)[: len(missing)])
