"""Which versions of ONNX's operators are read, and that nothing a file says is passed over: attributes, types."""

from __future__ import annotations

import itertools
from collections import defaultdict
from contextlib import suppress

import numpy as np
import onnx
import onnx.defs
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

import dagexec
from dagexec.errors import ModelFormatError, UnsupportedOperatorError
from dagexec.frontend.onnx import forms, from_model_proto
from dagexec.frontend.onnx import node as nodes
from dagexec.frontend.onnx.node import CannotConvertError, OnnxNode, Scope, converter_of

NEVER_READ = {
    "GroupNormalization": {"stash_type"},
    "LayerNormalization": {"stash_type"},
    "RMSNormalization": {"stash_type"},
    "QuantizeLinear": {"precision"},
    "Range": {"stash_type"},
    "Constant": {"sparse_value", "value_string", "value_strings"},
}
"""Attributes that may only be absent, or have their default."""

SCHEMAS = defaultdict(list)
for _schema in onnx.defs.get_all_schemas_with_history():
    if not _schema.domain:
        SCHEMAS[_schema.name].append(_schema)
CONVERTIBLE = sorted(name for name in SCHEMAS if converter_of(name) is not None)


def model_of(
    *operators: onnx.NodeProto, shape: tuple[int | str, ...] = (1, 4, 4, 4), opset: int = 13, **declared: object
) -> onnx.ModelProto:
    """A model with float input x whose output is y; `declared`: element type and sizes, by tensor name."""
    kinds = {"y": (TensorProto.FLOAT, None), **declared}
    values = {name: helper.make_tensor_value_info(name, *kind) for name, kind in kinds.items()}
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)]
    graph = helper.make_graph(operators, "g", inputs, [values.pop("y")], value_info=list(values.values()))
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


def with_attribute(op_type: str, **attributes: object) -> onnx.ModelProto:
    return model_of(helper.make_node(op_type, ["x"], ["y"], **attributes), opset=_newest(op_type))


def _newest(op_type: str) -> int:
    found = converter_of(op_type)
    assert found is not None
    return found[1]


@pytest.mark.parametrize("op_type", ["SpaceToDepth", "DepthToSpace"])
@pytest.mark.parametrize("mode", ["DCR", "CRD"])
def test_both_orders_of_blocks_are_computed(op_type: str, mode: str) -> None:
    if op_type == "SpaceToDepth" and onnx.defs.onnx_opset_version() < 28:
        pytest.skip("this onnx has no SpaceToDepth with a mode")
    model = with_attribute(op_type, blocksize=2, mode=mode)
    x = np.arange(64, dtype=np.float32).reshape(1, 4, 4, 4)
    [expected] = ReferenceEvaluator(model).run(None, {"x": x})
    with dagexec.compile(model) as executor:
        np.testing.assert_array_equal(executor.run({"x": x})["y"], expected)


def test_a_value_that_a_converter_does_not_know_is_refused() -> None:
    with pytest.raises(UnsupportedOperatorError, match="its attribute mode = 'RGB' is not supported"):
        from_model_proto(with_attribute("DepthToSpace", blocksize=2, mode="RGB"), foreign=False)


def test_an_attribute_that_nothing_reads_is_refused_unless_it_has_its_default() -> None:
    scale = helper.make_node("ConstantOfShape", ["n"], ["s"])
    size = helper.make_node("Constant", [], ["n"], value=numpy_helper.from_array(np.array([4])))
    for stash_type, refused in ((1, False), (10, True)):
        norm = helper.make_node("LayerNormalization", ["x", "s", "s"], ["y"], stash_type=stash_type)
        model = model_of(size, scale, norm, opset=17)
        if refused:
            with pytest.raises(UnsupportedOperatorError, match="its attribute stash_type = 10 is not supported"):
                from_model_proto(model, foreign=False)
        else:
            from_model_proto(model)


@pytest.mark.parametrize("op_type", CONVERTIBLE)
def test_every_attribute_of_every_version_that_is_accepted_is_read_or_refused(op_type: str) -> None:
    named: set[str] = set()
    asked: set[str] = set()
    for schema in SCHEMAS[op_type]:
        if schema.since_version <= _newest(op_type):
            named |= schema.attributes.keys()
            asked |= _asked(op_type, schema)
    assert named - asked == NEVER_READ.get(op_type, set())


def _asked(op_type: str, schema: onnx.defs.OpSchema) -> set[str]:
    """The attributes that the converter asks for, with constants as inputs or with computed ones, read or not."""
    found = converter_of(op_type)
    assert found is not None
    asked: set[str] = set()
    counts = {max(schema.min_input, min(schema.max_input, count)) for count in (4, 9)}
    constants = (None, np.zeros(1, np.int8), np.array([1.0, 1, 2, 2]))
    for count, constant, read in itertools.product(counts, constants, ({"o0"}, {"o0", "o1"})):
        shapes = {f"i{index}": (1, 4, 4, 4) for index in range(count)}
        values = {} if constant is None else {f"i{index}": constant for index in range(1, count)}
        proto = helper.make_node(op_type, [*shapes], ["o0", "o1"][: schema.max_output])
        node = OnnxNode(proto, schema.since_version, Scope(values, shapes, set(read)))
        with suppress(CannotConvertError, ModelFormatError):
            found[0](node)
        asked |= node.asked
    return asked


@pytest.mark.parametrize("op_type", CONVERTIBLE)
def test_the_newest_version_that_is_read_is_one_of_the_operators(op_type: str) -> None:
    versions = {schema.since_version for schema in SCHEMAS[op_type]}
    assert _newest(op_type) in versions or _newest(op_type) > onnx.defs.onnx_opset_version()


def test_a_newer_version_of_an_operator_is_refused_and_both_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    found = converter_of("GlobalMaxPool")
    assert found is not None
    monkeypatch.setitem(nodes._converters, ("", "GlobalMaxPool"), (found[0], 1))
    monkeypatch.setattr(forms, "_known", {})
    from_model_proto(model_of(helper.make_node("GlobalMaxPool", ["x"], ["y"]), opset=21))
    with pytest.raises(UnsupportedOperatorError, match="version 22 of the operator is newer than 1, the newest that"):
        from_model_proto(model_of(helper.make_node("GlobalMaxPool", ["x"], ["y"]), opset=22), foreign=False)


def test_the_first_operator_sets_broadcast_only_where_they_say_so() -> None:
    bias = numpy_helper.from_array(np.arange(4, dtype=np.float32), "b")
    model = model_of(helper.make_node("Add", ["x", "b"], ["y"], broadcast=1, axis=1), opset=6)
    model.graph.initializer.append(bias)
    x = np.zeros((1, 4, 4, 4), np.float32)
    with dagexec.compile(model) as executor:
        found = executor.run({"x": x})["y"]
    np.testing.assert_array_equal(found, x + np.arange(4, dtype=np.float32).reshape(4, 1, 1))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("ir_version", 1 << 40, "IR version 1099511627776; expected at most 14"),
        ("ir_version", -1, "IR version -1; expected at most 14"),
        ("opset", 12, "operator set 'ai.onnx' is imported in two versions"),
        ("domain", 1 << 31, "operator set 'other' has no version 2147483648"),
        ("domain", -1, "operator set 'other' has no version -1"),
        ("input", 0, "input 'x' is given twice"),
    ],
)
def test_what_contradicts_itself_is_refused(field: str, value: int, message: str) -> None:
    model = model_of(helper.make_node("Relu", ["x"], ["y"]))
    if field == "opset":
        model.opset_import.append(helper.make_opsetid("ai.onnx", value))
    elif field == "domain":
        model.opset_import.append(helper.make_opsetid("other", value))
    elif field == "input":
        model.graph.input.append(model.graph.input[0])
    else:
        setattr(model, field, value)
    with pytest.raises(ModelFormatError, match=message):
        from_model_proto(model)


def test_a_domain_that_is_not_text_is_refused() -> None:
    model = model_of(helper.make_node("Relu", ["x"], ["y"]))
    model.opset_import.append(helper.make_opsetid("other", 1))
    damaged = onnx.ModelProto.FromString(model.SerializeToString().replace(b"other", b"ot\xffer"))
    with pytest.raises(ModelFormatError, match="UTF-8"):
        from_model_proto(damaged)


RELU = (helper.make_node("Relu", ["x"], ["r"]), helper.make_node("Neg", ["r"], ["y"]))


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        ({"y": (TensorProto.INT64, None)}, "tensor 'y' is declared as int64, and float32 is computed"),
        ({"r": (TensorProto.FLOAT8E5M2, None)}, "tensor 'r' is declared as float8e5m2, and float32 is computed"),
        ({"y": (TensorProto.FLOAT, ["n", 4, 4])}, r"tensor 'y' is declared with shape \[\?, 4, 4\], computed \["),
        (
            {"r": (TensorProto.FLOAT, ["n", 5, 4, 4])},
            r"'r' is declared with shape \[\?, 5, 4, 4\], computed \[\?, 4, 4, 4\]",
        ),
    ],
)
def test_a_declared_type_that_is_not_the_computed_one_is_refused(declared: dict[str, object], message: str) -> None:
    with pytest.raises(ModelFormatError, match=message):
        from_model_proto(model_of(*RELU, shape=("n", 4, 4, 4), **declared))


def test_a_declared_type_behind_a_computed_shape_is_compared() -> None:
    """The rows that Reshape keeps are known for each size of the open axis alone."""
    nodes = [
        helper.make_node("Shape", ["x"], ["sizes"]),
        helper.make_node("Constant", [], ["kept"], value_ints=[0, 1]),
        helper.make_node("Gather", ["sizes", "kept"], ["some"]),
        helper.make_node("Constant", [], ["rest"], value_ints=[16]),
        helper.make_node("Concat", ["some", "rest"], ["shape"], axis=0),
        helper.make_node("Reshape", ["x", "shape"], ["r"]),
        helper.make_node("Neg", ["r"], ["y"]),
    ]
    from_model_proto(model_of(*nodes, shape=("n", 4, 4, 4), r=(TensorProto.FLOAT, ["n", 4, 16])))
    with pytest.raises(ModelFormatError, match=r"'r' is declared with shape \[\?, 8, 8\], computed \[\?, 4, 16\]"):
        from_model_proto(model_of(*nodes, shape=("n", 4, 4, 4), r=(TensorProto.FLOAT, ["n", 8, 8])))


@pytest.mark.parametrize("shape", [(1, 4, 4, 4), ("n", 4, 4, 4), ("n", 4, "h", "w")])
def test_declared_types_that_leave_sizes_open_or_are_right_are_taken(shape: tuple[int | str, ...]) -> None:
    for sizes in (None, shape, ["a", "b", "c", "d"], []):
        from_model_proto(model_of(*RELU, shape=shape, y=(TensorProto.FLOAT, sizes), r=(0, sizes)))
