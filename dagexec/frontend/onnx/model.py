"""Loading ONNX models: parse and check the file, convert its graph, and divide the result into nets and parameters.

`graph` converts; operators that need to be computed only once go into the init net.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import onnx

from dagexec.core.model import InputInfo, Model, Overridable
from dagexec.core.node import Node
from dagexec.core.operator_index import import_modules
from dagexec.core.program import Program
from dagexec.core.proto import NetDef
from dagexec.core.spelling import did_you_mean
from dagexec.errors import ArgumentError, FeedError, ModelFormatError, UnsupportedOperatorError
from dagexec.foreign import check_for_inference
from dagexec.frontend.onnx.declared_types import check_declared
from dagexec.frontend.onnx.defaults import overridable_inputs, without_data
from dagexec.frontend.onnx.external_data import ExternalData
from dagexec.frontend.onnx.foreign_nodes import merged, settle
from dagexec.frontend.onnx.functions import Functions
from dagexec.frontend.onnx.graph import (
    GraphConversion,
    initializer_arrays,
    opset_versions,
    standard_domain,
)
from dagexec.frontend.onnx.inferred_shapes import inferred_shapes
from dagexec.frontend.onnx.initializers import Array, element_type
from dagexec.frontend.onnx.model_file import read_model
from dagexec.frontend.onnx.node import Scope
from dagexec.frontend.onnx.scoping import check_origins, check_provided, given_names, listed
from dagexec.frontend.onnx.stated import dims_of, stated_of
from dagexec.platform.records import dataclass

import_modules("dagexec.frontend.onnx.converters")

_NEWEST_IR_VERSION = 14

Shapes = Mapping[str, Sequence[int | None]]


def load_onnx(
    path: str | os.PathLike[str],
    shapes: Shapes | None = None,
    *,
    foreign: bool = True,
    overridable: Collection[str] | None = None,
) -> Model:
    """The model in an ONNX file. External data is read from the file's folder, and nowhere else.

    With `foreign`, nodes that dagexec has no operators for are left to another runtime. `shapes` and `overridable` are
    as for `from_model_proto`.
    Raises ModelFormatError, naming the file, when it is no valid model; UnsupportedOperatorError, listing every node
    that dagexec cannot run.
    """
    proto, own = read_model(path)
    try:
        return _from_message(proto, ExternalData(Path(path).parent, own), shapes, overridable, foreign=foreign)
    except (ModelFormatError, UnsupportedOperatorError) as error:
        raise type(error)(f"{path}: {error}") from None


def from_model_proto(
    proto: onnx.ModelProto,
    base_dir: str | os.PathLike[str] | None = None,
    shapes: Shapes | None = None,
    *,
    foreign: bool = True,
    overridable: Collection[str] | None = None,
) -> Model:
    """A Model from an ONNX message; tensors keep their names, nodes become operators of the same name.

    `base_dir` is the folder where external data may be; without it external data is an error. `shapes` are sizes of
    inputs, by name, in place of those that the model states; None for a size that stays open. Runs may be fed others
    for the `overridable` initializers: None for those that the standard says, which are inputs too.
    Raises FeedError for a shape of what is no input, and for an overridable name that is no initializer, else what
    `load_onnx` does, without a file's name.
    """
    external = ExternalData(None if base_dir is None else Path(base_dir))
    return _from_message(proto, external, shapes, overridable, foreign=foreign)


def _from_message(
    proto: onnx.ModelProto,
    external: ExternalData,
    shapes: Shapes | None,
    overridable: Collection[str] | None,
    *,
    foreign: bool,
) -> Model:
    with _as_model_errors():
        if not proto.HasField("graph") or not (proto.graph.node or proto.graph.output):
            raise ModelFormatError("not an ONNX model: there is no graph in it")
        if not 0 <= proto.ir_version <= _NEWEST_IR_VERSION:
            raise ModelFormatError(f"IR version {proto.ir_version}; expected at most {_NEWEST_IR_VERSION}")
        check_for_inference(proto)
        with external:
            values = initializer_arrays(proto.graph, external)
        defaults = overridable_inputs(proto, values, overridable, _input_info)
        model = _Conversion(proto, dict(values), shapes or {}, foreign).model()
        if not defaults:
            return model
        anew = _Overriding(without_data(proto), values, defaults, dict(shapes or {}), foreign)
        return model.changed(overridable=Overridable(defaults, values, model.program, anew))


@contextmanager
def _as_model_errors() -> Iterator[None]:
    """Turns errors of a message's names and attributes into errors of the model."""
    try:
        yield
    except UnicodeDecodeError:
        raise ModelFormatError("a name in the model is not UTF-8 text") from None
    except ArgumentError as error:
        raise ModelFormatError(str(error)) from None


@dataclass(frozen=True)
class _Overriding:
    """Converts a model again, with some of the overridable initializers as inputs."""

    proto: onnx.ModelProto
    values: Mapping[str, Array]
    defaults: Mapping[str, InputInfo]
    shapes: Shapes
    foreign: bool

    def __call__(self, names: Collection[str]) -> Model:
        values = {name: array for name, array in self.values.items() if name not in names}
        inputs = {name: self.defaults[name] for name in sorted(names)}
        with _as_model_errors():
            return _Conversion(without_data(self.proto, names), values, self.shapes, self.foreign, inputs).model()


class _Conversion:
    """One model during conversion: the file's statements, and the conversion of its graph."""

    def __init__(
        self,
        proto: onnx.ModelProto,
        values: dict[str, Array],
        shapes: Shapes,
        foreign: bool,
        overriding: Mapping[str, InputInfo] = MappingProxyType({}),
    ) -> None:
        """`values` are the initializers that are constants; others are the inputs `overriding`."""
        self.graph = graph = proto.graph
        self._reshaped = bool(shapes)
        self._foreign = foreign
        _check_inputs(graph)
        nodes = listed(graph.node)
        names = [*given_names(graph), *(name for node in nodes for name in node.outputs if name)]
        self.outputs = tuple([value.name for value in graph.output])
        check_origins(names)
        check_provided(nodes, self.outputs, names)
        self._nodes = nodes
        graph_inputs = {value.name: value for value in graph.input}
        infos = {
            name: _input_info(value)
            for name, value in graph_inputs.items()
            if name not in values and name not in overriding
        }
        self.inputs = {**_with_shapes(infos, shapes), **overriding}
        self.stated = stated_of(graph)
        if shapes:
            self.stated.shapes.clear()
        self.stated.shapes.update({name: info.shape for name, info in self.inputs.items() if info.shape is not None})
        read = set(self.outputs).union(*[node.needs for node in nodes])
        self.scope = Scope(values, dict(self.stated.shapes), read, read.union(names), self.stated.variants)
        self.scope.infer_shapes = lambda: inferred_shapes(graph, proto.opset_import, self.inputs)
        functions = Functions(proto.functions, standard_domain)
        self.conversion = GraphConversion(
            proto.ir_version, _opsets(proto), functions, self.scope, self.inputs, foreign=foreign
        )
        self.conversion.strings.add_inputs(self.graph)

    def model(self) -> Model:
        """Convert all nodes. Raises UnsupportedOperatorError for all that cannot be, with advice."""
        try:
            return self._model()
        except UnsupportedOperatorError as error:
            advice = self.conversion.refusals.advice(self.inputs, foreign=self._foreign)
            raise UnsupportedOperatorError(f"{error}\n{advice}") from None
        finally:
            self._let_go()

    def _let_go(self) -> None:
        """Break reference cycles, which would keep the message and replaced weights until the next collection."""
        self.scope.values.clear()
        self.scope.infer_shapes = dict

    def _model(self) -> Model:
        operators = merged(self.conversion.convert(self._nodes, self.outputs), self.outputs, self.conversion.types)
        self.conversion.refusals.check()
        return self._assemble(operators)

    def _assemble(self, operators: Sequence[Node]) -> Model:
        name = self.graph.name or "onnx"
        wanted = _read(operators) | set(self.outputs)
        init_operators = _needed(self.conversion.once, wanted)
        read_once = _read(init_operators)
        parameters = {key: value for key, value in self.scope.values.items() if key in wanted or key in read_once}
        settled, types = settle([*init_operators, *operators], parameters, self.inputs, self.conversion.types)
        init_operators, operators = settled[: len(init_operators)], settled[len(init_operators) :]
        if not self._reshaped:
            check_declared(self.stated, settled, parameters, self.inputs, types)
        filled = [blob for operator in init_operators for blob in operator.output if blob in wanted]
        external = [*self.inputs, *(key for key in parameters if key in wanted), *filled]
        header = NetDef(name=name, external_input=external, external_output=self.outputs)
        init_net = None
        if init_operators:
            init_inputs = [key for key in parameters if key in read_once]
            init_header = NetDef(name=f"{name}_init", external_input=init_inputs, external_output=filled)
            init_net = Program(tuple(init_operators), init_header)
        return Model(
            name, Program(tuple(operators), header), init_net, parameters, self.inputs, self.outputs, texts=True
        )


def _check_inputs(graph: onnx.GraphProto) -> None:
    """Raise ModelFormatError when two inputs have one name."""
    seen: set[str] = set()
    for name in [value.name for value in graph.input]:
        if name in seen:
            raise ModelFormatError(f"input {name!r} is given twice")
        seen.add(name)


def _opsets(proto: onnx.ModelProto) -> dict[str, int]:
    """The operator sets that the model imports. Files older than IR version 3 mean version 1."""
    opsets = opset_versions(proto.opset_import)
    return {"": 1} if not opsets and proto.ir_version < 3 else opsets


def _input_info(value: onnx.ValueInfoProto) -> InputInfo:
    kind, owner = value.type, f"input {value.name!r}"
    is_optional = kind.WhichOneof("value") == "optional_type"
    kind = kind.optional_type.elem_type if is_optional else kind
    is_sequence = kind.WhichOneof("value") == "sequence_type"
    kind = kind.sequence_type.elem_type if is_sequence else kind
    if kind.WhichOneof("value") != "tensor_type":
        raise UnsupportedOperatorError(f"{owner} is not a tensor, or a sequence of such; maps are not supported")
    dtype = element_type(kind.tensor_type.elem_type, owner)
    sizes = None if is_optional or is_sequence else dims_of(kind.tensor_type, value.name)
    return InputInfo(dtype, sizes, is_sequence, is_optional)


def _with_shapes(inputs: Mapping[str, InputInfo], shapes: Shapes) -> dict[str, InputInfo]:
    """The inputs with other shapes than the model states."""
    if unknown := sorted(shapes.keys() - inputs.keys()):
        hint = did_you_mean(unknown[0], inputs)
        raise FeedError(f"shapes: {unknown[0]!r} is not an input; expected one of {sorted(inputs)}{hint}")
    changed = {name: replace(inputs[name], shape=tuple(sizes)) for name, sizes in shapes.items()}
    for name, info in changed.items():
        stated = inputs[name].shape
        if stated is not None and len(stated) != len(info.shape or ()):
            raise FeedError(f"shapes: input {name!r} has {len(stated)} axes, found {info.shape}")
        if any(size is not None and size < 0 for size in info.shape or ()):
            raise FeedError(f"shapes: input {name!r}: a size is negative: {info.shape}")
    return {**inputs, **changed}


def _read(operators: Iterable[Node]) -> set[str]:
    return {name for operator in operators for name in operator.input}


def _needed(operators: Sequence[Node], wanted: set[str]) -> Sequence[Node]:
    """Those of `operators` that the `wanted` blobs depend on, in the same order."""
    wanted = set(wanted)
    needed = []
    for operator in reversed(operators):
        if wanted.intersection(operator.output):
            needed.append(operator)
            wanted.update(operator.input)
    return needed[::-1]
