"""Model: a net that can be run, its parameters, inputs and outputs.

Frontends (`dagexec.frontend`), the zoo and the model helper create Models; the executor runs them. A Model is data
without a workspace or threads, so several executors may share one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar, cast, runtime_checkable

import numpy.typing as npt

from dagexec.core.drawing.names import operator_name
from dagexec.core.dtypes import TypeMeta
from dagexec.core.io_access import IO
from dagexec.core.program import Program, program_of
from dagexec.core.proto import NetDef
from dagexec.core.python_step import PythonStep
from dagexec.platform.addresses import address_of
from dagexec.platform.lazy import LazyModule
from dagexec.platform.records import dataclass

if not TYPE_CHECKING:
    pictures = LazyModule("dagexec.core.drawing.pictures")
else:
    from dagexec.core.drawing import pictures


@dataclass(frozen=True, slots=True)
class InputInfo:
    """What is known of a model input before it is fed.

    Attributes:
        dtype: the element type, or None if the model does not specify it (Caffe2's files do not).
        shape: the sizes of the axes, None for any size; or None if even their number is unknown.
        is_sequence: a list of arrays of that dtype is fed, of any shapes.
        is_optional: None may be fed.
    """

    dtype: TypeMeta | None = None
    shape: tuple[int | None, ...] | None = None
    is_sequence: bool = False
    is_optional: bool = False

    def __str__(self) -> str:
        if self.is_sequence or self.is_optional:
            what = "optional " * self.is_optional + "sequence of " * self.is_sequence
            return f"{what}{replace(self, is_sequence=False, is_optional=False)}"
        axes = "[...]" if self.shape is None else f"[{', '.join('?' if n is None else str(n) for n in self.shape)}]"
        return f"{self.dtype or 'any'}{axes}"


@dataclass(frozen=True)
class Overridable:
    """Parameters that a run may be fed others for; constants in the net of their model.

    Attributes:
        inputs: those parameters, by name.
        values: the parameters of the model, used where nothing is fed.
        program: the net of their model; `model_with` does not fit models with other operators or parameters.
        model_with: makes the model with the parameters of these names as inputs.
    """

    inputs: Mapping[str, InputInfo]
    values: Mapping[str, npt.NDArray[Any]]
    program: Program
    model_with: Callable[[Collection[str]], Model]

    def belongs_to(self, model: Model) -> bool:
        """False when the model got other operators or arrays."""
        own = model.program
        if own is not self.program and own.message() != self.program.message():
            return False
        pairs = ((array, self.values.get(name)) for name, array in model.parameters.items())
        return all(own is None or address_of(own) == address_of(array) for array, own in pairs)


@dataclass(frozen=True)
class StageTypes:
    """Inputs and outputs of a stage of a pipeline as a model of its own.

    Attributes:
        inputs: of its model, by the blobs of the pipeline that they read.
        outputs: the blobs of the pipeline that are its model's outputs, in order.
    """

    inputs: Mapping[str, InputInfo]
    outputs: tuple[str, ...]


Nets = TypeVar("Nets", NetDef, NetDef | None)


class _Net(Generic[Nets]):
    """A field with a net: a message, made from records on demand; it is authoritative from then on.

    A message may be changed by its users, so records that were made from it are not kept beside it.
    """

    def __init__(self, *default: Nets) -> None:
        """A field that need not be given has a default."""
        self._default: tuple[Nets, ...] = default

    def __set_name__(self, _owner: type[Model], name: str) -> None:
        self._name = name

    def __get__(self, model: Model | None, _owner: type[Model]) -> Nets:
        if model is None:
            if not self._default:
                raise AttributeError(self._name)
            return self._default[0]
        net = model.__dict__[self._name]
        if isinstance(net, Program):
            net = model.__dict__[self._name] = net.message()
        return cast(Nets, net)

    def __set__(self, model: Model, net: NetDef | Program | None) -> None:
        model.__dict__[self._name] = net


_NETS = ("net", "init_net")
_NO_NET = Program((), NetDef())


@dataclass(frozen=True)
class Model:
    """A net with its parameters, inputs and outputs: what frontends produce and `dagexec.compile` accepts.

        model = dagexec.load_model("model.onnx")
        print(model.inputs, model.outputs, [operator.type for operator in model.net.op])
        executor = dagexec.compile(model)

    Attributes:
        name: the name in messages.
        net: the net of one run. It reads inputs, parameters and the outputs of `init_net`.
        init_net: a net that runs once before the first run and computes parameters, or None.
        parameters: arrays that the nets read, by blob name. They are read-only and not copied.
        inputs: blobs to be fed before each run, in the model's order.
        overridable: parameters that may be fed too (ONNX's initializers that are inputs), or None.
        outputs: blobs that are the result of a run.
        folder: the folder to which paths of storage operators are relative: that of the model's files.
        allow_io: what its operators may access besides blobs.
        python_steps: functions of the application that operators of the net call (`dagexec.Pipeline`).
        stages: models that it was put together from, by name. Operators and parameters of "detect" are called
            "detect/..."; passes rewrite them as those of that model.
        texts: strings among its results are `str`, as ONNX's bindings give them, and not `bytes`, as Caffe2's do.
    """

    name: str
    net: _Net[NetDef] = _Net[NetDef]()
    init_net: _Net[NetDef | None] = _Net[NetDef | None](None)
    parameters: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)
    inputs: Mapping[str, InputInfo] = field(default_factory=dict)
    outputs: tuple[str, ...] = ()
    folder: Path = Path()
    allow_io: IO = IO.NONE
    overridable: Overridable | None = None
    python_steps: tuple[PythonStep, ...] = ()
    stages: Mapping[str, StageTypes] = field(default_factory=dict)
    texts: bool = False

    @property
    def program(self) -> Program:
        """The net of one run as records. Raises what `program_of` raises for a message that is no net."""
        return program_of(self.__dict__["net"])

    @property
    def has_init_net(self) -> bool:
        """True when there is a net that computes parameters."""
        return self.__dict__["init_net"] is not None

    @property
    def init_program(self) -> Program:
        """The net that computes parameters as records; without operators where there is none."""
        return program_of(self.__dict__["init_net"]) if self.has_init_net else _NO_NET

    def as_records(self) -> Model:
        """The same with its nets as records, made here once for all that compile it and run it.

        Raises what `program_of` raises for a message that is no net.
        """
        if not any(isinstance(self.__dict__[name], NetDef) for name in _NETS):
            return self
        return self.changed(net=self.program, init_net=self.init_program if self.has_init_net else None)

    def changed(self, **fields: Any) -> Model:
        """As `dataclasses.replace`, which would turn records into messages; `net` and `init_net` may be either."""
        copy = object.__new__(type(self))
        copy.__dict__.update(self.__dict__, **fields)
        return copy

    def _repr_html_(self) -> str:
        """For notebooks: the net, inputs and outputs."""
        operators = self.program.op
        writers: dict[str, int] = {}
        edges = []
        for index, operator in enumerate(operators):
            edges += [(writers[name], index) for name in operator.input if name in writers]
            writers.update(dict.fromkeys(operator.output, index))
        names = [operator_name(operator) for operator in operators]
        rows = [("input", name, str(info)) for name, info in self.inputs.items()]
        rows += [("output", name, "") for name in self.outputs]
        return pictures.summary(
            f"Model {self.name}: {len(operators)} operators",
            pictures.net_picture([operator.type for operator in operators], names, edges),
            pictures.table(("", "blob", "type"), rows),
        )

    def needed_inputs(self) -> frozenset[str]:
        """The inputs that the net reads or returns. Caffe2's files may declare more, such as labels."""
        net: NetDef | Program = self.__dict__["net"]  # either says what is read
        unread = self.inputs.keys() - set(self.outputs)
        for operator in net.op:
            if not unread:
                break
            unread.difference_update(operator.input)
        return frozenset(self.inputs.keys() - unread)


@runtime_checkable
class MakesModel(Protocol):
    """Something that makes a Model: a pipeline of several."""

    def as_model(self) -> Model:
        """The model; the same whenever it is asked for."""
