"""Converting the nodes of one graph: the model's own, or one that a node holds as a branch or a body.

A node whose inputs are all parameters is computed once, not in every run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import onnx
import onnx.checker
import onnx.defs

from dagexec.core.model import InputInfo
from dagexec.core.node import Node
from dagexec.core.program import Program
from dagexec.core.proto import NetDef
from dagexec.core.purity import is_pure
from dagexec.core.registry import is_registered, schema_of
from dagexec.core.schema import ElementTypeError
from dagexec.errors import ModelFormatError, SchemaError, UnsupportedOperatorError
from dagexec.frontend.onnx.external_data import ExternalData
from dagexec.frontend.onnx.folding import fold
from dagexec.frontend.onnx.foreign_nodes import FOREIGN, foreign_operator, is_deterministic, merged, variant_outputs
from dagexec.frontend.onnx.forms import Conversions, conversions_of, form_of
from dagexec.frontend.onnx.functions import Functions, body, standard_function
from dagexec.frontend.onnx.initializers import NOWHERE, Array, dense_array, tensor_array
from dagexec.frontend.onnx.known_types import KnownTypes
from dagexec.frontend.onnx.node import (
    DEFAULT_DOMAINS,
    CannotConvertError,
    OnnxNode,
    Scope,
    Subgraph,
    UnknownSizeError,
    converter_of,
    definition_of,
    domain_of,
    node_label,
)
from dagexec.frontend.onnx.refusal import Refusals
from dagexec.frontend.onnx.scoping import Listed, check_origins, listed, own_names, renamed, sorted_nodes
from dagexec.frontend.onnx.stated import stated_of
from dagexec.frontend.onnx.string_tensors import StringTensors

_MAX_VERSION = 2**31 - 1
"""Of an operator set, that the onnx package can check nodes of."""


class GraphConversion:
    """A model's graph during conversion, with the graphs inside its nodes: known facts, and the operators so far.

    Tensors of inner graphs get names that no other has, so all share one Scope.

    Attributes:
        scope: known facts about tensors.
        once: operators to run once, before the first run, as they read parameters alone.
        refusals: nodes that cannot be run.
        types: of tensors, as far as they are known.
        strings: the tensors that hold strings.
    """

    def __init__(
        self,
        ir_version: int,
        opsets: Mapping[str, int],
        functions: Functions,
        scope: Scope,
        inputs: Mapping[str, InputInfo],
        *,
        foreign: bool,
    ) -> None:
        """`opsets`: versions of operator sets by domain, the default one as ''; `inputs`: those of the model.

        With `foreign`, nodes that dagexec has no operators for are left to another runtime.
        """
        self.scope = scope
        self.once: list[Node] = []
        self.refusals = Refusals()
        self._ir_version = ir_version
        self.types = KnownTypes(scope.values, inputs)
        self.strings = StringTensors(self.types)
        self._foreign = foreign
        self._opsets = opsets
        self._checker: tuple[object, onnx.checker.C.CheckerContext] | None = None  # made for these operator sets
        self._functions = functions
        self._kept: set[str] = set()
        self._computed_once: set[str] = set()

    def convert(self, nodes: list[Listed], returned: Iterable[str]) -> list[Node]:
        """The operators of one run, for nodes in any order; `returned` are the tensors that their graph returns."""
        self._kept.update(returned)
        operators: list[Node] = []
        for node in sorted_nodes(nodes):
            converted = self._convert(node)
            if self._is_told(converted) and self._may_be_once(node, converted):
                if fold(converted, self.scope):
                    continue
                if self._is_constant(converted):
                    self._computed_once.update(name for operator in converted for name in operator.output)
                    self.once.extend(converted)
                    continue
            operators.extend(converted)
        return operators

    def subgraph(self, graph: onnx.GraphProto, label: str, fed: int) -> Subgraph:
        """The net of a graph that a node holds; `label` names the node in messages.

        Its constants become parameters of the model, so they are among the captured tensors. So is an input with an
        initializer, unless the node feeds all of the inputs: `fed` is the number that it feeds.
        """
        check_origins(own_names(graph))
        names = self.scope.names
        graph = renamed(graph, lambda name: self.scope.new_name(name) if name in names else name)
        returned = [value.name for value in graph.output]
        names.update(own_names(graph))
        values = initializer_arrays(graph, NOWHERE)
        graph_inputs = [value.name for value in graph.input]
        if len(graph_inputs) > fed:
            graph_inputs = [name for name in graph_inputs if name not in values]
        nodes = listed(graph.node)
        self.scope.read |= set(returned).union(*(node.needs for node in nodes))
        self.scope.values.update((name, array) for name, array in values.items() if name not in graph_inputs)
        self.types.add_constants(values)
        stated = stated_of(graph)
        self.scope.shapes.update(stated.shapes)
        self.scope.variants.update(stated.variants)
        operators = merged(self.convert(nodes, returned), returned, self.types)
        written = {name for operator in operators for name in operator.output}
        needed = dict.fromkeys([*(name for operator in operators for name in operator.input), *returned])
        outer = tuple(name for name in needed if name not in written and name not in graph_inputs)
        header = NetDef(name=graph.name or label, external_input=[*graph_inputs, *outer], external_output=returned)
        return Subgraph(Program(tuple(operators), header), tuple(graph_inputs), tuple(returned), outer)

    def _convert(self, node: Listed) -> list[Node]:
        opset = self._opset(node)
        function = self._functions.of(node.proto)
        if function is not None:
            return self._inline(node.proto, function)
        if opset is None:
            return self._refuse(node, "the model imports no operator set of that domain")
        try:
            operators = self._renamed(node, opset)
            self.types.follow(operators)
        except ElementTypeError as error:
            return self._fallback(node, error.problem)
        except CannotConvertError as reason:
            self.refusals.sizes_missing |= isinstance(reason, UnknownSizeError)
            return self._fallback(node, str(reason))
        return self.strings.kept_on_host(node, opset, operators)

    def _renamed(self, node: Listed, opset: int) -> list[Node]:
        """The operators of a node, by its form's conversion or by its converter. Raises CannotConvertError."""
        form = form_of(node, (opset, self._ir_version), self.scope.read)
        if form is None:
            return self._converted(node, opset, Conversions())
        conversions = conversions_of(form)
        names = (*node.inputs, *node.outputs)
        conversion = conversions.find(names, self.scope)
        if conversion is not None:
            return conversion.operators_of(names, node.name, self.scope)
        return self._converted(node, opset, conversions)

    def _converted(self, node: Listed, opset: int, known: Conversions) -> list[Node]:
        """The operators that a node's converter makes; `known` receives the conversion for others of its form."""
        proto, domain = node.proto, domain_of(node.op_type, node.domain)
        entry = converter_of(node.op_type, domain)
        if entry is None:
            raise CannotConvertError("there is no converter for it")
        converter, newest = entry
        if onnx.defs.has(node.op_type, domain):
            self._check_node(node)
        version = definition_of(node.op_type, opset, domain).version
        if version > newest:
            raise CannotConvertError(
                f"version {version} of the operator is newer than {newest}, the newest that is read"
            )
        seen = OnnxNode(proto, opset, self.scope, self.subgraph)
        operators = converter(seen)
        seen.check_all_read()
        self._verify(operators)
        variants = variant_outputs(proto, self._opsets) if domain else []
        self.scope.variants.update(variants)
        known.add(seen, operators, variants)
        return operators

    def _verify(self, operators: Sequence[Node]) -> None:
        """Raise CannotConvertError for an operator with more or fewer blobs than its schema allows, and the like."""
        missing = sorted({operator.type for operator in operators if not is_registered(operator.type)})
        if missing:
            raise CannotConvertError(f"dagexec has no operator {', '.join(missing)}")
        for operator in operators:
            try:
                schema_of(operator.type).verify(operator)
            except SchemaError as error:
                raise CannotConvertError(f"as {operator.type}: {error}") from None

    def _inline(self, proto: onnx.NodeProto, function: onnx.FunctionProto) -> list[Node]:
        """The operators of a function's nodes in place of `proto`."""
        self._functions.enter(proto, function)
        nodes = listed(body(function, proto, self.scope.new_name))
        self.scope.read.update(*(node.needs for node in nodes))
        around = self._opsets
        self._opsets = {**around, **opset_versions(function.opset_import)}
        operators = self.convert(nodes, ())
        self._opsets = around
        self._functions.leave()
        return operators

    def _fallback(self, node: Listed, reason: str) -> list[Node]:
        """The operators for a node without a converter, or that its converter refuses, for this `reason`."""
        proto, opset, domain = node.proto, self._opset(node), domain_of(node.op_type, node.domain)
        function = standard_function(node.op_type, opset) if opset is not None and not domain else None
        if function is not None:
            return self._inline(proto, function)
        if not self._foreign:
            return self._refuse(node, reason)
        if onnx.defs.has(node.op_type, node.domain):
            self._check_node(node)
        operator = foreign_operator(proto, self._opsets, self.scope, reason)
        self.types.follow([operator])
        return self.strings.kept_on_host(node, opset, [operator])

    def _check_node(self, node: Listed) -> None:
        """The onnx package's own check: arity, attribute names and types, for the operator set in force."""
        if self._checker is None or self._checker[0] is not self._opsets:
            context = onnx.checker.C.CheckerContext()
            context.ir_version = self._ir_version or onnx.IR_VERSION
            context.opset_imports = dict(self._opsets)
            self._checker = self._opsets, context
        try:
            bare = _without_subgraphs(node.proto) if node.holds_graphs else node.proto
            onnx.checker.check_node(bare, self._checker[1])
        except (onnx.checker.ValidationError, RuntimeError, ValueError) as error:
            raise ModelFormatError(f"{node_label(node.proto)}: {str(error).strip()}") from None

    def _refuse(self, node: Listed, reason: str) -> list[Node]:
        self.refusals.add(node.proto, self._opset(node), reason)
        return []

    def _opset(self, node: Listed) -> int | None:
        return self._opsets.get(standard_domain(node.domain))

    def _may_be_once(self, node: Listed, operators: Sequence[Node]) -> bool:
        """True when operators need not be computed in every run if their inputs are known in advance.

        Nets inside of operators are left to runs, which can be stopped. Operators that dequantize a parameter are
        computed in every run, where a pass can see the integers; and so are those that a graph returns.
        """
        written = {name for operator in operators for name in operator.output}
        if not (written.isdisjoint(self._kept) and written.isdisjoint(self.scope.variants)):
            return False
        if node.op_type == "DequantizeLinear":
            return False
        if [operator.type for operator in operators] == [FOREIGN]:
            return is_deterministic(node.proto, self._opset(node))
        return all(
            is_registered(operator.type) and not schema_of(operator.type).sub_nets and is_pure(operator)
            for operator in operators
        )

    def _is_told(self, operators: Sequence[Node]) -> bool:
        """True when results may follow from parameters or, of operators that read types alone, from shapes."""
        return self._is_constant(operators) or any(schema_of(one.type).from_types is not None for one in operators)

    def _is_constant(self, operators: Sequence[Node]) -> bool:
        """True when operators read parameters alone."""
        written: set[str] = set()
        for operator in operators:
            for name in operator.input:
                if name not in self.scope.values and name not in self._computed_once and name not in written:
                    return False
            written.update(operator.output)
        return True


def _without_subgraphs(proto: onnx.NodeProto) -> onnx.NodeProto:
    """The node with empty graphs in place of its own, whose nodes are checked one by one."""
    bare = onnx.NodeProto(name=proto.name, op_type=proto.op_type, domain=proto.domain)
    bare.input.extend(proto.input)
    bare.output.extend(proto.output)
    for attribute in proto.attribute:
        if attribute.HasField("g"):
            bare.attribute.add(name=attribute.name, type=attribute.type, g=onnx.GraphProto(name="graph"))
        else:
            bare.attribute.append(attribute)
    return bare


def opset_versions(imports: Iterable[onnx.OperatorSetIdProto]) -> dict[str, int]:
    """Operator set versions by domain, the default one as ''. Raises ModelFormatError for two of one domain, and others
    that no operator set has.
    """
    opsets: dict[str, int] = {}
    for entry in imports:
        if not isinstance(entry.domain, str):
            raise ModelFormatError("the name of an operator set's domain is not UTF-8 text")
        domain = standard_domain(entry.domain)
        if not 0 <= entry.version <= _MAX_VERSION:
            raise ModelFormatError(f"operator set {domain or 'ai.onnx'!r} has no version {entry.version}")
        if opsets.setdefault(domain, entry.version) != entry.version:
            raise ModelFormatError(f"operator set {domain or 'ai.onnx'!r} is imported in two versions")
    version = opsets.get("")
    if version is not None and version < 1:
        raise ModelFormatError(f"operator set version {version} does not exist")
    newest = onnx.defs.onnx_opset_version()
    if version is not None and version > newest:
        raise UnsupportedOperatorError(
            f"operator set {version} is newer than {newest}, the newest that onnx {onnx.__version__} knows"
        )
    return opsets


def standard_domain(name: str) -> str:
    """The one name of a domain that has several: '' of the default one."""
    return "" if name in DEFAULT_DOMAINS else name


def initializer_arrays(graph: onnx.GraphProto, external: ExternalData) -> dict[str, Array]:
    """The initializers of a graph, by name. Raises ModelFormatError."""
    values: dict[str, Array] = {}
    for tensor in graph.initializer:
        if not tensor.name:
            raise ModelFormatError("an initializer has no name")
        if tensor.name in values:
            raise ModelFormatError(f"initializer {tensor.name!r} is given twice")
        values[tensor.name] = tensor_array(tensor, external, f"initializer {tensor.name!r}")
    for sparse in graph.sparse_initializer:
        name = sparse.values.name
        if name in values:
            raise ModelFormatError(f"initializer {name!r} is given twice")
        values[name] = dense_array(sparse, external, f"sparse initializer {name!r}")
    return values
