"""Registries: operator schemas by type, operator classes by device kind, type and engine, net types by name.

Modules of operators are imported when one of their types is first asked for (`core.operator_index`).

An operator is found by trying the engines that its def asks for, then the default engine; one that raises
UnsupportedFeatureError while it is built is skipped, and the log says why.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from dagexec.core.io_access import check_allowed
from dagexec.core.node import Node, node_of, operator_label
from dagexec.core.onnx_name import OnnxName
from dagexec.core.operator import Operator
from dagexec.core.operator_index import (
    PACKAGE,
    known_types,
    load_all,
    load_onnx,
    load_operator,
    load_own,
    load_plugins,
    made_elsewhere,
)
from dagexec.core.program import Program, program_of
from dagexec.core.proto import NetDef, OperatorDef
from dagexec.core.schema import OpSchema
from dagexec.core.workspace import Workspace
from dagexec.errors import SchemaError, UnsupportedFeatureError, UnsupportedOperatorError
from dagexec.platform.lazy import LazyModule

if not TYPE_CHECKING:
    difflib = LazyModule("difflib")
else:
    import difflib


logger = logging.getLogger("dagexec")

OperatorClass = TypeVar("OperatorClass", bound=type[Operator])
Fields = ParamSpec("Fields")
Made = TypeVar("Made")

_schemas: dict[str, OpSchema] = {}
_onnx: dict[tuple[str, str], tuple[OpSchema, OnnxName]] = {}  # by domain and operator
_argument_names: set[str] = set()  # of all operator types
_operators: dict[tuple[str, str, str], type[Operator]] = {}
_implemented: set[tuple[str, str]] = set()  # device kinds and types
_Candidates = tuple[tuple[str, type[Operator]], ...]
_candidates: dict[tuple[str, str, str], _Candidates] = {}
"""By device kind, type and the engines that a def names, what is tried for it; where one is missing, nothing."""
_OF_CLASSES_MADE = ("abc", "functools")
"""Modules of classes that `type` has made, as Python says."""
_modules: dict[str, str] = {}  # device kinds to the modules that register their operators


def register_schema(schema: OpSchema) -> OpSchema:
    """Make `schema` known under its type. Raises SchemaError when it, or its ONNX operator, has another schema."""
    for name in schema.onnx:
        known, _ = _onnx.get((name.domain, name.type), (schema, name))
        if known is not schema:
            raise SchemaError(f"ONNX operator {name.type} is {known.type!r} already, and {schema.type!r}")
    if _schemas.setdefault(schema.type, schema) is not schema:
        raise SchemaError(f"operator type {schema.type!r} already has a schema")
    for name in schema.onnx:
        _onnx[name.domain, name.type] = schema, name
    _argument_names.update(schema.args, schema.unread_args)
    return schema


def operator(schema: OpSchema, *, device: str = "cpu", engine: str = "") -> Callable[[OperatorClass], OperatorClass]:
    """Class decorator: this class computes `schema.type` on devices of kind `device`, with `engine`.

    The schema is registered with its first class. Raises SchemaError when the place is taken.
    """

    def register(cls: OperatorClass) -> OperatorClass:
        elsewhere = not cls.__module__.startswith(PACKAGE) and cls.__module__ not in _OF_CLASSES_MADE
        if elsewhere:  # whose types must not be those of modules that are still to be imported
            load_own(schema.type)
            for name in schema.onnx:
                load_onnx(name.domain, name.type)
        new = schema.type not in _schemas or _schemas[schema.type] is not schema
        if new:
            register_schema(schema)
        key = (device, schema.type, _engine_key(engine))
        if key in _operators:
            raise SchemaError(f"operator {schema.type!r} on {device} with engine {engine or 'DEFAULT'} exists already")
        cls.schema = schema
        _operators[key] = cls
        _implemented.add((device, schema.type))
        _candidates.clear()
        if new and elsewhere:
            made_elsewhere(schema.type)
        return cls

    return register


def by_fields(schema: Callable[Fields, OpSchema], decorator: Callable[[OpSchema], Made]) -> Callable[Fields, Made]:
    """A decorator that takes a schema, as one that takes the fields of the schema."""

    def of_fields(*args: Fields.args, **kwargs: Fields.kwargs) -> Made:
        return decorator(schema(*args, **kwargs))

    return of_fields


def declares(schema: Callable[Fields, OpSchema]) -> Callable[Fields, Callable[[OperatorClass], OperatorClass]]:
    """A function that makes schemas, as a class decorator: the class computes, on the host, the new operator type."""
    return by_fields(schema, operator)


new_operator = declares(OpSchema)
"""Class decorator: the class computes, on the host, a new operator type whose OpSchema has these fields."""


def register_when_asked(device: str, module: str) -> None:
    """`module` registers the operators of devices of kind `device`: it is imported when one of those is looked up."""
    _modules[device] = module


def _have_registered(device: str) -> None:
    """Import the module of `register_when_asked`; a thread that finds another at it waits."""
    if device in _modules:
        load_all()  # they are made of those of the host
        importlib.import_module(_modules[device])


def schema_of(operator_type: str) -> OpSchema:
    """The schema of an operator type. Raises UnsupportedOperatorError, suggesting close names."""
    found = _schemas.get(operator_type)
    if found is None:
        load_operator(operator_type)
        found = _schemas.get(operator_type)
    if found is None:
        raise UnsupportedOperatorError(_unknown(operator_type))
    return found


def onnx_operator(domain: str, name: str) -> tuple[OpSchema, OnnxName] | None:
    """The schema that declares that it is an ONNX operator, and how; None where there is none."""
    load_onnx_operator(domain, name)
    if (domain, name) not in _onnx:
        load_all()
    return _onnx.get((domain, name))


def load_onnx_operator(domain: str, name: str) -> None:
    """Import what declares an ONNX operator: a module of this package, or else plugins, which may convert it, too."""
    if (domain, name) not in _onnx and not load_onnx(domain, name):
        load_plugins()


def onnx_operators() -> Mapping[tuple[str, str], tuple[OpSchema, OnnxName]]:
    """By domain and ONNX operator, what `onnx_operator` gives."""
    load_all()
    return _onnx


def is_registered(operator_type: str) -> bool:
    """True when an operator type has a schema."""
    load_operator(operator_type)
    return operator_type in _schemas


def registered_operators() -> list[str]:
    """The names of all operator types, sorted."""
    load_all()
    return sorted(_schemas)


def registered_engines(operator_type: str, device: str = "cpu") -> list[str]:
    """The engines an operator type has on a device kind; the default engine is called DEFAULT."""
    load_operator(operator_type)
    _have_registered(device)
    return sorted(engine or "DEFAULT" for kind, name, engine in _operators if (kind, name) == (device, operator_type))


def has_engine(operator_type: str, engine: str) -> bool:
    """True when `engine` computes an operator type on the host."""
    load_operator(operator_type)
    return ("cpu", operator_type, _engine_key(engine)) in _operators


def has_implementation(kind: str, operator_type: str) -> bool:
    """True when some engine computes an operator type on devices of `kind`; the simulated one has those of the host."""
    load_operator(operator_type)
    _have_registered(kind)
    if (kind, operator_type) in _implemented:
        return True
    return kind == "sim" and ("cpu", operator_type) in _implemented and not schema_of(operator_type).on_host


def operator_class(operator_type: str) -> type[Operator]:
    """The class that computes an operator type on the host with the default engine.

    Raises UnsupportedOperatorError when there is none.
    """
    found = _operators.get(("cpu", schema_of(operator_type).type, ""))
    if found is None:
        raise UnsupportedOperatorError(f"operator type {operator_type!r} has no implementation for the host")
    return found


def operator_module(operator_type: str) -> str:
    """The module of the class that computes an operator type on the host; "" when it has no default engine there.

    Of a class that `type` made, which Python says is of module abc, it is that of the class it is made from.
    """
    load_operator(operator_type)
    cls = _operators.get(("cpu", operator_type, ""))
    return "" if cls is None else next(base.__module__ for base in cls.__mro__ if base.__module__ != "abc")


def verify(definition: OperatorDef | Node, *, index: int = -1, net: str = "") -> OpSchema:
    """Check an operator against its schema, before it is built. Raises UnsupportedOperatorError or SchemaError.

    An argument that operators of this type do not know is an ArgumentError, which suggests a name.
    """
    definition = node_of(definition)
    form = definition.form
    schema = _schemas.get(definition.type)
    if schema is not None and form.verified is schema:
        return schema
    try:
        schema = schema_of(definition.type)
        schema.verify(definition)
    except (UnsupportedOperatorError, SchemaError) as error:
        raise type(error)(f"{operator_label(definition, index, net)}: {error}") from None
    unknown = _unknown_argument(definition, schema)
    if unknown is not None:
        raise schema.unknown_argument(unknown, operator_label(definition, index, net))
    if schema.sub_nets:
        for body in sub_nets_of(definition, schema).values():
            verify_all(body.op, body.name)
    form.verified = schema
    return schema


def sub_nets_of(definition: Node, schema: OpSchema) -> dict[str, Program]:
    """The nets that an operator runs, by the argument that holds each."""
    return {
        name: definition.values.once(("program", name), partial(program_of, value))
        for name in schema.sub_nets
        if isinstance(value := definition.values.get(name), NetDef)
    }


def verify_all(definitions: Sequence[Node], net: str = "") -> tuple[OpSchema, ...]:
    """The schemas of the operators of a net, each checked with `verify`; all types that are unknown are one error."""
    check_known([(net, definitions)], f"net {net!r}")
    return tuple([verify(definition, index=index, net=net) for index, definition in enumerate(definitions)])


def check_known(nets: Iterable[tuple[str, Sequence[Node]]], owner: str) -> None:
    """Raise UnsupportedOperatorError, which names all types without a schema, how often each occurs, and where first.

    `nets` are names of nets with their operators, `owner` is what they belong to.
    """
    labels: dict[str, list[str]] = {}
    for net, definitions in nets:
        unknown = {name for name in {definition.type for definition in definitions} if not is_registered(name)}
        for index, definition in enumerate(definitions if unknown else ()):
            if definition.type in unknown:
                labels.setdefault(definition.type, []).append(operator_label(definition, index, net))
    if not labels:
        return
    count = sum(map(len, labels.values()))
    if count == 1:
        [(name, [label])] = labels.items()
        raise UnsupportedOperatorError(f"{label}: {_unknown(name)}")
    rows = sorted(labels.items(), key=lambda row: -len(row[1]))
    lines = [f"{_unknown(name)}: {len(found)} operator(s), first {found[0]}" for name, found in rows]
    what = "1 type" if len(rows) == 1 else f"{len(rows)} types"
    raise UnsupportedOperatorError(f"{owner}: {count} operators of {what} cannot be run:\n  " + "\n  ".join(lines))


def _unknown(operator_type: str) -> str:
    close = difflib.get_close_matches(operator_type, {*_schemas, *known_types()}, n=3)
    hint = f"; close names: {', '.join(close)}" if close else ""
    if operator_type.startswith("Int8"):
        hint = (
            "; models with Caffe2's int8 nets are loaded by dagexec.load_model, and dagexec.caffe2.workspace runs these"
        )
    return f"operator type {operator_type!r} is unknown{hint}"


def _unknown_argument(definition: Node, schema: OpSchema) -> str | None:
    """The first argument that nothing reads, if there is one: a name misspelled would be a result that is wrong.

    A gradient operator has all arguments of the operator that it is of, so it may have those of any type.
    """
    for name in definition.values:
        if not schema.knows_argument(name) and not (definition.is_gradient_op and _is_argument(name)):
            return name
    return None


def _is_argument(name: str) -> bool:
    """True when some operator type has an argument of that name."""
    if name not in _argument_names:
        load_all()
    return name in _argument_names


def create_operator(
    definition: OperatorDef | Node, workspace: Workspace, *, index: int = -1, net: str = ""
) -> Operator:
    """Build the operator that is described, on its device, with the first engine that serves it.

    Raises SchemaError, UnsupportedOperatorError, MissingBlobError, or AccessError for one that reaches further than the
    workspace allows; each names operator and net.
    """
    node = node_of(definition, operator_label(definition, index, net))
    verify(node, index=index, net=net)
    return create_verified(node, workspace, index=index, net=net)


def create_verified(definition: Node, workspace: Workspace, *, index: int = -1, net: str = "") -> Operator:
    """`create_operator` for a def that `verify` has seen, as it has all of a Graph."""
    schema = schema_of(definition.type)
    if schema.does_io > workspace.allow_io:
        check_allowed(schema.does_io, workspace.allow_io, operator_label(definition, index, net))
    kind = definition.device.kind
    known = _candidates.get((kind, definition.type, definition.engine))
    refusals: list[str] = []
    for engine, cls in known or _find_candidates(kind, definition):
        try:
            return cls(definition, workspace, index=index, net=net)
        except UnsupportedFeatureError as reason:
            label = operator_label(definition, index, net)
            logger.info("%s: engine %s skipped: %s", label, engine or "DEFAULT", str(reason))
            refusals.append(f"{engine or 'DEFAULT'}: {reason}")
    label = operator_label(definition, index, net)
    why = f"every engine refused: {'; '.join(refusals)}" if refusals else "none is registered"
    raise UnsupportedOperatorError(f"{label}: no implementation for device kind {kind!r}: {why}")


def _find_candidates(kind: str, definition: Node) -> _Candidates:
    """The engines to try, with their classes: those that are asked for, then the default engine."""
    asked = [_engine_key(name.strip()) for name in definition.engine.split(",")] if definition.engine else []
    found = {name: _implementation(kind, definition.type, name) for name in (*asked, "")}
    for name in asked:
        if name and found[name] is None:
            logger.info("%s: engine %s is not available on %s", definition.type, name, kind)
    made = tuple((name, cls) for name, cls in found.items() if cls is not None)
    if len(made) == len(found):
        _candidates[kind, definition.type, definition.engine] = made
    return made


def _implementation(kind: str, operator_type: str, engine: str) -> type[Operator] | None:
    """The class for a device kind; the simulated device runs those of the host."""
    load_operator(operator_type)
    _have_registered(kind)
    found = _operators.get((kind, operator_type, engine))
    return _operators.get(("cpu", operator_type, engine)) if found is None and kind == "sim" else found


def _engine_key(engine: str) -> str:
    return "" if engine in ("", "DEFAULT") else engine
