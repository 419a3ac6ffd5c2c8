"""What holds for every operator, tried on the examples that there are of it, by each engine.

The tests of a family have what is its own: recorded values, corners, and bugs that were.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from dagexec import NetDef
from dagexec.core.dtypes import from_numpy
from dagexec.core.inference import infer_listed
from dagexec.core.node import node_of
from dagexec.core.proto import OperatorDef
from dagexec.core.registry import has_engine, schema_of
from dagexec.core.schema import UNBOUNDED, ElementTypeError, TensorType
from dagexec.errors import DagexecError, OperatorError, SchemaError, ShapeError
from dagexec.scheduler.nets.simple import SimpleNet
from tests.fuzz.near import same
from tests.ops.examples import FLOATS, Example, cases, examples, of_case
from tests.ops.onednn.engine import needs_onednn
from tests.ops.running import Array, workspace_of

ONEDNN = [name for name in examples() if has_engine(name, "ONEDNN")]
each_engine = pytest.mark.parametrize(
    ("op_type", "engine"),
    [(name, "") for name in examples()] + [pytest.param(name, "ONEDNN", marks=needs_onednn) for name in ONEDNN],
)
each_type = pytest.mark.parametrize("op_type", examples())

CLOSE = {np.float16: 8e-3, ml_dtypes.bfloat16: 6e-2, np.float32: 2e-5, np.float64: 1e-11}
"""How far an engine may be from float64, relative to the largest element."""

ROUNDS_BY_PLACE = {("Exp", "ONEDNN")}
"""Where oneDNN's own primitive computes by another formula in place: within rounding."""

CALLS_BODIES = ("If", "Loop", "Scan")
"""Whose inputs a net checks that names them otherwise, and in which 16-bit numbers are rounded again and again."""


def difference(one: Array, other: Array) -> float:
    """The largest, relative to the largest element; infinite where NaN, shapes, or what is no float differ."""
    if one.dtype not in FLOATS:
        return 0.0 if same(one, other) else np.inf
    if one.shape != other.shape:
        return np.inf
    wide, exact = one.astype(np.float64), other.astype(np.float64)
    is_finite = np.isfinite(exact)
    if not np.array_equal(wide[~is_finite], exact[~is_finite], equal_nan=True):
        return np.inf
    wide, exact = wide[is_finite], exact[is_finite]
    return float(np.abs(wide - exact).max(initial=0) / max(np.abs(exact).max(initial=0), 1e-3))


def places(one: Example, results: Sequence[Array]) -> Iterator[tuple[int, int]]:
    """An input, and an output that may take its name, and now has another."""
    rule = schema_of(one.definition.type).inplace
    for target, (name, y) in enumerate(zip(one.definition.output, results, strict=True)):
        for source, x in enumerate(one.inputs):
            fits = (
                name not in one.definition.input
                and source not in one.constant
                and (x.shape, x.dtype) == (y.shape, y.dtype)
            )
            if fits and rule(source, target):
                yield source, target


@pytest.mark.slow
@each_engine
def test_in_place_it_gives_the_bytes_that_it_gives_apart(op_type: str, engine: str) -> None:
    for one in examples()[op_type]:
        apart = one.run(engine)
        for source, target in places(one, apart):
            if f"x{source}" in _added(one):
                continue
            taken = one.in_place(source, target)
            for found, expected in zip(
                [*taken.run(engine), *taken.run(engine, pieces=7)], [*apart, *apart], strict=True
            ):
                is_near = (op_type, engine) in ROUNDS_BY_PLACE and difference(found, expected) < 1e-6
                assert is_near or same(found, expected), f"output {target} in place of input {source} {one}"


def _added(one: Example) -> set[str]:
    """The inputs that post-ops read in their own places, and that the output takes with `sum` alone."""
    return {
        f"x{text.decode().rsplit(':', 1)[-1]}"
        for argument in one.definition.arg
        if argument.name == "post_ops"
        for text in argument.strings
        if text.count(b":") == 1
    }


@pytest.mark.slow
@each_engine
def test_the_number_of_pieces_changes_no_byte(op_type: str, engine: str) -> None:
    for one in examples()[op_type]:
        whole = one.run(engine, pieces=1)
        for pieces in (2, 7):
            assert all(map(same, one.run(engine, pieces=pieces), whole)), f"{pieces} pieces {one}"


RANKED = [name for name in examples() if re.search("[123]D(Gradient)?$", name)]


@pytest.mark.parametrize("op_type", RANKED)
def test_a_name_of_fixed_rank_computes_what_the_other_does_and_refuses_another_rank(op_type: str) -> None:
    """By the same engines."""
    name = re.sub("[123]D", "", op_type)
    assert has_engine(op_type, "ONEDNN") == has_engine(name, "ONEDNN")
    for one in examples()[op_type]:
        other = replace(one, definition=renamed(one, name))
        assert all(map(same, one.run(), other.run())), str(one)
        [rank] = {int(digit) for digit in re.findall("([123])D", op_type)}
        wrong = replace(one, inputs=[one.inputs[0][..., np.newaxis], *one.inputs[1:]])
        with pytest.raises(ShapeError, match=f"'x0' must have {rank + 2} axes, found {rank + 3}"):
            wrong.run()


def renamed(one: Example, op_type: str) -> OperatorDef:
    """Its definition with another operator type."""
    made = OperatorDef()
    made.CopyFrom(one.definition)
    made.type = op_type
    return made


@each_type
def test_outputs_have_the_types_that_a_compiler_infers(op_type: str) -> None:
    for one in examples()[op_type]:
        values = dict(zip(one.definition.input, one.inputs, strict=True))
        types = {name: TensorType(array.shape, from_numpy(array.dtype)) for name, array in values.items()}
        inferred = infer_listed("net", [node_of(one.definition)], types, values).blobs
        for name, found in zip(one.definition.output, one.run(), strict=True):
            kind = inferred[name]
            assert kind is None or (kind.shape, kind.meta.numpy) == (found.shape, found.dtype), f"{name} {one}"


@pytest.mark.slow
@each_engine
def test_all_floats_agree_with_float64(op_type: str, engine: str) -> None:
    for one in examples()[op_type]:
        for dtype in FLOATS if one.is_of_floats and op_type not in CALLS_BODIES else ():
            narrow = one.of_type(dtype)
            with suppress(ElementTypeError):
                exact = narrow.of_type(np.float64).run()
                for found, expected in zip(narrow.run(engine), exact, strict=True):
                    is_float = found.dtype in FLOATS
                    limit = max(CLOSE[dtype], CLOSE[found.dtype.type]) if is_float else 0.0
                    assert difference(found, expected) <= limit, f"{np.dtype(dtype)} {narrow}"


@needs_onednn
@pytest.mark.parametrize("op_type", ONEDNN)
def test_an_engine_gives_what_the_default_one_gives_and_nan_where_that_has_it(op_type: str) -> None:
    for one in examples()[op_type]:
        narrow = one.of_type(np.float32)
        for spoiled in (narrow, *with_nan(narrow)):
            try:
                expected = spoiled.run()
            except DagexecError:  # an input that must not be NaN
                continue
            pieces = 0 if spoiled is narrow else 2
            for found, other in zip(spoiled.run("ONEDNN", pieces), expected, strict=True):
                is_label = spoiled is not narrow and other.dtype not in FLOATS  # that of a row whose score is NaN
                assert is_label or difference(found, other) < 2e-5, str(spoiled)


def with_nan(one: Example) -> Iterator[Example]:
    """It with a NaN in its first input."""
    first, *others = one.inputs
    if first.dtype == np.float32 and first.size:
        spoiled = first.copy()
        spoiled.flat[first.size // 2] = np.nan
        yield replace(one, inputs=[spoiled, *others])


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["", pytest.param("ONEDNN", marks=needs_onednn)])
@pytest.mark.parametrize("op_type", cases())
def test_of_no_rows_it_gives_none(op_type: str, engine: str) -> None:
    if engine and not has_engine(op_type, engine):
        pytest.skip("computed by the default engine")
    for case in cases()[op_type]:
        some, none = of_case(case, 3).run(engine), of_case(case, 0).run(engine)
        for index, (found, other) in enumerate(zip(none, some, strict=True)):
            is_shared = found.shape == other.shape
            assert is_shared or found.size == 0 or index >= case.outputs - case.unread, f"output {index} of {case}"


def failure(one: Example) -> DagexecError | None:
    """What a net says of it that cannot run it."""
    workspace = workspace_of(zip(one.definition.input, one.inputs, strict=True))
    try:
        with SimpleNet(NetDef(name="the net", op=[one.definition]), workspace) as net:
            net.run()
    except DagexecError as error:
        return error
    return None


def misfits(one: Example, index: int) -> Iterator[Example]:
    """It with an input of text, of two more axes, and of one axis."""
    array = one.inputs[index]
    more = np.concatenate([array.reshape(-1), array.reshape(-1)[:1]])
    for other in (np.full(array.shape, b"text", object), array.reshape(*array.shape, 1, 1), more):
        yield replace(one, inputs=[*one.inputs[:index], other, *one.inputs[index + 1 :]])


@each_type
def test_an_input_that_does_not_fit_is_named_with_operator_and_net(op_type: str) -> None:
    one = examples()[op_type][0]
    for index in range(len(one.inputs)):
        for wrong in misfits(one, index):
            error = failure(wrong)
            if error is None:
                continue
            cause = error.__cause__ if isinstance(error, OperatorError) else error
            assert isinstance(cause, DagexecError), f"{cause!r} {wrong}"
            assert f"{op_type} '{one.definition.output[0]}' (operator 0) of net 'the net'" in str(error)
            is_named = f"input 'x{index}' must" in str(error) or f"x{index}: " in str(error)
            assert is_named or not isinstance(cause, ElementTypeError) or op_type in CALLS_BODIES, str(error)


@each_type
def test_too_few_and_too_many_inputs_and_outputs_are_refused_with_what_was_expected(op_type: str) -> None:
    one, schema = examples()[op_type][0], schema_of(op_type)
    for kind, (fewest, most) in (("input", schema.inputs), ("output", schema.outputs)):
        for count in (fewest - 1, most + 1 if most < UNBOUNDED else -1):
            if count < 0:
                continue
            wrong = renamed(one, op_type)
            blobs = wrong.input if kind == "input" else wrong.output
            blobs[:] = [f"{kind[0]}{index}" for index in range(count)]
            inputs = (list(one.inputs) * (count + 1))[:count] if kind == "input" else one.inputs
            error = failure(replace(one, definition=wrong, inputs=inputs))
            assert isinstance(error, SchemaError)
            expected = rf"{op_type} .*of net 'the net'.*expected .* {kind}\(s\), found {count}"
            assert re.search(expected, str(error)), str(error)
