"""Merge...FeatureTensors: features of examples, each with a key, from several inputs to one list for each example.

An input is a group of tensors. Of a `Single` feature it has a value for each example, and `presence` says which
examples have it; its key is one of the argument `feature_ids`. Of `Multi` features `lengths` says how many each example
has, and `keys` which. A value is a `Scalar`, a `List`, or a `Map` with keys of its own; lengths of lists are tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from dagexec.core.dtypes import BOOL, INT32, INT64
from dagexec.core.gradient import GradientOperators, GradientRequest, gradient_by, gradient_of
from dagexec.core.schema import OperatorCall, TensorType
from dagexec.errors import ArgumentError
from dagexec.ops.base.array_function import array_function
from dagexec.ops.base.blocks import Array
from dagexec.ops.families.sparse.segments import rows_of_segments
from dagexec.platform.records import dataclass

_MAX_GROUPS = 64

_GROUPS = {
    "SingleScalar": ("values", "presence"),
    "SingleList": ("lengths", "values", "presence"),
    "SingleMap": ("lengths", "value_keys", "values", "presence"),
    "MultiScalar": ("lengths", "keys", "values"),
    "MultiList": ("lengths", "keys", "values_lengths", "values"),
    "MultiMap": ("lengths", "keys", "values_lengths", "value_keys", "values"),
}
"""By kind, the tensors of a group."""

_TYPES = {"lengths": (INT32,), "values_lengths": (INT32,), "presence": (BOOL,), "keys": (INT64,)}
_COUNTING = frozenset(_TYPES) - {"keys"}
_FEATURE_IDS = {"feature_ids": "the key of each input's feature"}

Group = Mapping[str, Array]


@dataclass(frozen=True)
class Merged:
    """Where the features of all groups go.

    Attributes:
        lengths: how many features each example has.
        order: for each feature in the result its place in those of one group after another.
        keys: for each feature of one group after another its number there, or that of its group.
        value_lengths: how many rows of values each feature in the result has.
        rows: for each row of values in the result its place in those of one group after another.
        group_rows: how many rows of values each group has.
    """

    lengths: Array
    order: Array
    keys: Array
    value_lengths: Array
    rows: Array
    group_rows: tuple[int, ...]


def _merged(groups: Sequence[Group]) -> Merged:
    """Features sorted by their example; those of one example by their group, and then as they stand there."""
    count = len(next(iter(groups[0].values())))
    examples, keys, picked, lengths = [], [], [], []
    segments = 0
    for number, group in enumerate(groups):
        if "presence" in group:
            of_group = group.get("lengths", np.ones(count, np.int64))
            here = np.flatnonzero(group["presence"])
            examples.append(here)
            keys.append(np.full(here.size, number))
        else:
            examples.append(np.repeat(np.arange(count), group["lengths"]))
            of_group = group.get("values_lengths", np.ones(examples[-1].size, np.int64))
            here = np.arange(examples[-1].size)
            keys.append(here)
        picked.append(here + segments)
        lengths.append(of_group)
        segments += len(of_group)
    every = np.concatenate(examples)
    order = np.argsort(every, kind="stable")
    all_lengths, features = np.concatenate(lengths), np.concatenate(picked)[order]
    return Merged(
        np.bincount(every, minlength=count),
        order,
        np.concatenate(keys),
        all_lengths[features],
        rows_of_segments(all_lengths, features),
        tuple(int(of_group.sum()) for of_group in lengths),
    )


def _grouped(roles: Sequence[str], tensors: Sequence[Array]) -> list[Group]:
    """The tensors of each group by their role."""
    size = len(roles)
    return [dict(zip(roles, tensors[at : at + size], strict=True)) for at in range(0, len(tensors), size)]


def _checked(call: OperatorCall, roles: Sequence[str], count: int) -> list[Group]:
    """The tensors that count, of the first `count` inputs. Raises ShapeError where they do not fit together."""
    if count % len(roles) or not count:
        raise call.fail(f"expected {len(roles)} tensors for each group of features: {', '.join(roles)}")
    examples = call.require_rank(0, 1)
    groups: list[Group] = []
    for at in range(0, count, len(roles)):
        place = {role: at + number for number, role in enumerate(roles)}
        for role, index in place.items():
            call.require_rank(index, 1)
            if role in _TYPES:
                call.require_types(index, *_TYPES[role])
        group = {role: call.known_value(index) for role, index in place.items() if role in _COUNTING}
        features = examples
        if "presence" in place:
            call.require_shape(place["presence"], examples, "a truth value for each example")
        if "lengths" in place:
            call.require_shape(place["lengths"], examples, "a length for each example")
            features = (_total(call, group["lengths"]),)
        if "keys" in place:
            call.require_shape(place["keys"], features, "a key for each feature")
        rows = features
        if "values_lengths" in place:
            call.require_shape(place["values_lengths"], features, "a length for each feature")
            rows = (_total(call, group["values_lengths"]),)
        for role in {"values", "value_keys"} & place.keys():
            call.require_shape(place[role], rows, "a row for each that the lengths count")
        groups.append(group)
    return groups


def _total(call: OperatorCall, lengths: Array) -> int:
    if (lengths < 0).any():
        raise call.fail(f"lengths must be at least 0, found {int(lengths.min())}")
    return int(lengths.sum(dtype=np.int64))


def _infer(kind: str) -> Callable[[OperatorCall], list[TensorType]]:
    roles = _GROUPS[kind]

    def infer(call: OperatorCall) -> list[TensorType]:
        groups, size = _checked(call, roles, len(call.inputs)), len(roles)
        if kind.startswith("Single") and len(call.arguments.ints("feature_ids")) != len(groups):
            raise ArgumentError(f"{call.label}: expected a key in 'feature_ids' for each of {len(groups)} inputs")
        for role in {"values", "value_keys"} & set(roles):
            call.require_same_type(*range(roles.index(role), len(call.inputs), size))
        merged = _merged(groups)
        features, rows = merged.order.shape, merged.rows.shape
        found = [TensorType(call.inputs[0].shape[:1], INT32), TensorType(features, INT64)]
        if not kind.endswith("Scalar"):
            found.append(TensorType(features, INT32))
        if kind.endswith("Map"):
            found.append(TensorType(rows, call.inputs[roles.index("value_keys")].meta))
        return [*found, TensorType(rows, call.inputs[roles.index("values")].meta)]

    return infer


def _define(kind: str) -> None:
    roles = _GROUPS[kind]
    is_single, op_type = kind.startswith("Single"), f"Merge{kind}FeatureTensors"
    counting = tuple(role for role in roles if role in _COUNTING)
    values = [] if kind.endswith("Scalar") else ["values_lengths"]
    values += ["values_keys"] if kind.endswith("Map") else []

    def compute(call: OperatorCall, *inputs: Array) -> Sequence[Array]:
        groups = _grouped(roles, inputs)
        merged = _merged(groups)
        if is_single:
            keys = np.array(call.arguments.ints("feature_ids"), np.int64)[merged.keys]
        else:
            keys = np.concatenate([group["keys"] for group in groups])
        found = [merged.lengths, keys[merged.order]]
        if not kind.endswith("Scalar"):
            found.append(merged.value_lengths)
        columns = ("value_keys", "values") if kind.endswith("Map") else ("values",)
        return [*found, *(np.concatenate([group[name] for group in groups])[merged.rows] for name in columns)]

    array_function(
        op_type,
        inputs=(len(roles), len(roles) * _MAX_GROUPS),
        infer=_infer(kind),
        doc="The features of each example from all inputs in one list, those of the first input first: how many there "
        "are, their keys, and their values one after another.",
        input_names=(*(f"{role}_0" for role in roles), "..."),
        output_names=("lengths", "keys", *values, "values"),
        args=_FEATURE_IDS if is_single else {},
        required_args=tuple(_FEATURE_IDS) if is_single else (),
        value_inputs=tuple(i for i in range(len(roles) * _MAX_GROUPS) if roles[i % len(roles)] in _COUNTING),
    )(compute)

    def infer_gradient(call: OperatorCall) -> list[TensorType]:
        count = len(call.inputs) - 1
        merged = _merged(_checked(call, counting, count))
        call.require_shape(count, merged.rows.shape, "a row for each value")
        if len(call.definition.output) != len(merged.group_rows):
            raise call.fail(f"expected an output for each of {len(merged.group_rows)} groups")
        return [TensorType((rows,), call.inputs[count].meta) for rows in merged.group_rows]

    def gradient(_call: OperatorCall, *inputs: Array) -> Sequence[Array]:
        merged = _merged(_grouped(counting, inputs[:-1]))
        dx = np.zeros(sum(merged.group_rows), inputs[-1].dtype)
        dx[merged.rows] = inputs[-1]
        return np.split(dx, np.cumsum(merged.group_rows)[:-1])

    array_function(
        f"{op_type}Gradient",
        inputs=(len(counting) + 1, len(counting) * _MAX_GROUPS + 1),
        outputs=(1, _MAX_GROUPS),
        infer=infer_gradient,
        doc=f"Gradient of {op_type}: to each value what its place in the result has, 0 to one that is not present.",
        input_names=(*(f"{role}_0" for role in counting), "...", "dY"),
        output_names=("dvalues_0", "..."),
        args=_FEATURE_IDS if is_single else {},
        value_inputs=tuple(range(len(counting) * _MAX_GROUPS)),
    )(gradient)

    @gradient_of(op_type)
    def make(request: GradientRequest) -> GradientOperators:
        """Of the values; it reads what counts them."""
        count, size = len(request.definition.input), len(roles)
        inputs = [request.x(index) for index in range(count) if roles[index % size] in _COUNTING]
        of_values = range(roles.index("values"), count, size)
        last = len(request.definition.output) - 1
        return request.single(f"{op_type}Gradient", [*inputs, request.dy(last)], of_values)


for _kind in _GROUPS:
    _define(_kind)


def infer_dense(call: OperatorCall) -> list[TensorType]:
    """As many features as are present. Raises ArgumentError for another number of keys than there are columns."""
    shape = call.require_rank(0, 2)
    call.require_types(1, BOOL)
    call.require_shape(1, shape, "a truth value for each value")
    if len(call.arguments.ints("feature_ids")) != shape[1]:
        raise ArgumentError(f"{call.label}: expected a key in 'feature_ids' for each of {shape[1]} columns")
    count = int(np.count_nonzero(call.known_value(1)))
    return [TensorType(shape[:1], INT32), TensorType((count,), INT64), TensorType((count,), call.inputs[0].meta)]


@array_function(
    "MergeDenseFeatureTensors",
    infer=infer_dense,
    doc="The features that are present in each row: how many, their keys, and their values one after another.",
    input_names=("values", "presence"),
    output_names=("lengths", "keys", "values"),
    args={"feature_ids": "the key of each column's feature"},
    required_args=("feature_ids",),
    value_inputs=(1,),
)
def merge_dense(call: OperatorCall, values: Array, presence: Array) -> Sequence[Array]:
    """A selection."""
    return [
        presence.sum(axis=1),
        np.array(call.arguments.ints("feature_ids"))[np.nonzero(presence)[1]],
        values[presence],
    ]


def infer_dense_gradient(call: OperatorCall) -> list[TensorType]:
    """A number for each truth value."""
    call.require_types(0, BOOL)
    call.require_shape(1, (int(np.count_nonzero(call.known_value(0))),), "a number for each feature that is present")
    return [TensorType(call.require_rank(0, 2), call.inputs[1].meta)]


@array_function(
    "MergeDenseFeatureTensorsGradient",
    infer=infer_dense_gradient,
    doc="Gradient of MergeDenseFeatureTensors: dY where features are present, 0 elsewhere.",
    input_names=("presence", "dY"),
    output_names=("dvalues",),
    args={"feature_ids": "the key of each column's feature; not read"},
    value_inputs=(0,),
)
def dense_gradient(_call: OperatorCall, presence: Array, dy: Array) -> Sequence[Array]:
    """The numbers put back."""
    dx = np.zeros(presence.shape, dy.dtype)
    dx[presence] = dy
    return [dx]


gradient_by("MergeDenseFeatureTensors", "MergeDenseFeatureTensorsGradient", ("X1", "dY2"))
