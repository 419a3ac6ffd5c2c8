"""Sums of several gradients of a value: dense ones are added, slices are concatenated."""

from __future__ import annotations

from collections.abc import Sequence

from dagexec.core.arguments import make_argument
from dagexec.core.proto import DeviceOption, OperatorDef
from dagexec.errors import GradientError
from dagexec.platform.records import dataclass
from dagexec.training.gradient_values import Emitter, Value, need, take_in_place_name_first


@dataclass(frozen=True)
class GradientSlices:
    """A sparse gradient: rows `values` at `indices`."""

    indices: Value
    values: Value


Part = Value | GradientSlices
"""A gradient, or a part of one, that an operator gives to one of its inputs."""


def tensors_of(part: Part) -> list[Value]:
    """The tensors that make up a gradient."""
    return [part.indices, part.values] if isinstance(part, GradientSlices) else [part]


def accumulate(
    emitter: Emitter, blob: str, parts: Sequence[Part], *, label: str, readable: bool, to_dense: bool
) -> Part:
    """The sum of the gradients of `blob`, in the order of `parts`; each must be counted as needed once.

    Slices stay slices, and an index may then occur more than once. Where some parts are dense, or the sum is asked
    for `to_dense`, slices are made dense first, for which the blob must be `readable`: its shape says how many rows
    there are. Raises GradientError, which starts with `label`, when it is not.
    """
    slices = [part for part in parts if isinstance(part, GradientSlices)]
    if len(slices) == len(parts) and not to_dense:
        return _joined(emitter, blob, slices) if len(parts) > 1 else parts[0]
    if slices and not readable:
        raise GradientError(
            f"{label}: a sparse gradient of it must be made dense, but it is overwritten, so its shape is not "
            f"available; write to another blob there"
        )
    dense = [_dense(emitter, blob, part) if isinstance(part, GradientSlices) else part for part in parts]
    if len(dense) == 1:
        return dense[0]
    base = f"{blob}_grad"
    ordered = take_in_place_name_first(dense, base)
    total = Value(base, _device(dense))
    need([total])
    emitter.emit(_operator("Sum", total.device), ordered, [total])
    return total


def _joined(emitter: Emitter, blob: str, parts: Sequence[GradientSlices]) -> GradientSlices:
    """The slices of all parts, concatenated."""
    device = _device([part.values for part in parts])
    joined = []
    for kind, pieces in (
        ("indices", [part.indices for part in parts]),
        ("values", [part.values for part in parts]),
    ):
        name = f"{blob}_grad_{kind}_concat"
        outputs = [Value(name, device), Value(f"{name}_split", device)]
        need(outputs[:1])
        definition = _operator("Concat", device)
        definition.arg.append(make_argument("axis", 0))
        emitter.emit(definition, pieces, outputs)
        joined.append(outputs[0])
    return GradientSlices(*joined)


def _dense(emitter: Emitter, blob: str, part: GradientSlices) -> Value:
    """The slices as a tensor of the shape of `blob`."""
    dense = Value(f"{blob}_grad", part.values.device)
    source = Value(blob)
    need([source, dense])
    emitter.emit(_operator("SparseToDense", dense.device), [part.indices, part.values, source], [dense])
    return dense


def _operator(op_type: str, device: DeviceOption | None) -> OperatorDef:
    definition = OperatorDef(type=op_type)
    if device is not None:
        definition.device_option.CopyFrom(device)
        definition.device_option.ClearField("random_seed")
    return definition


def _device(values: Sequence[Value]) -> DeviceOption | None:
    """The device of the operators that computed the values: of the first that has one, when they are on several."""
    return next((value.device for value in values if value.device is not None), None)
