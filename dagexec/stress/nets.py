"""Random nets that use every feature whose order of execution matters, with arrays to feed them.

One `random.Random` decides everything. Blobs belong to kinds: two blobs of a kind have one shape in any run, so they
can be combined without knowing the shape. All operators are cheap, and give the same bytes for the same input; values
stay small, so that no NaN appears whose bits might depend on more than the input.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dagexec.core import dtypes
from dagexec.core.arguments import ArgumentValue
from dagexec.core.device import Device
from dagexec.core.graph import Hazard, build_graph
from dagexec.core.model import InputInfo, Model
from dagexec.core.node import node_of
from dagexec.core.operator_def import op
from dagexec.core.proto import NetDef
from dagexec.core.registry import schema_of
from dagexec.platform.records import dataclass
from dagexec.stress.operators import FAILING_OPERATOR, PIECED_OPERATOR, Failure

Array = npt.NDArray[Any]

LIBRARY_STATES = 2
"""How many library states of a device the nets use."""

_WIDTH = 8
_IMAGE = (2, 5, 5)
_PIXELS = 50
_SWITCHES = "switches"
_COUNTS = "counts"


@dataclass(frozen=True)
class RandomNetOptions:
    """What a random net may contain.

    Attributes:
        devices: where operators are put; the first is the net's own.
        stateful: operators may also write the parameters, so that a run starts where the one before ended.
        most_operators: the longest net.
    """

    devices: tuple[str, ...] = ("cpu",)
    stateful: bool = False
    most_operators: int = 45


@dataclass(frozen=True)
class RandomNet:
    """A net, its parameters, and where its feeds come from.

    Attributes:
        net: the def, devices included.
        parameters: arrays by blob name.
        inputs: what every run is fed with.
        outputs: blobs to compare.
        batches: the rows that the feeds have, in turn.
        failing: how many operators can be told to fail.
        features: how often each feature occurs, by name.
    """

    net: NetDef
    parameters: Mapping[str, Array]
    inputs: Mapping[str, InputInfo]
    outputs: tuple[str, ...]
    batches: tuple[int, ...]
    failing: int
    features: Mapping[str, int]

    def model(self, *, devices: bool = True) -> Model:
        """The model to compile; without `devices`, all of it runs where the executor says."""
        return Model(
            self.net.name,
            self.net if devices else without_devices(self.net),
            parameters=self.parameters,
            inputs=self.inputs,
            outputs=self.outputs,
        )

    def feeds(self, number: int, failures: Mapping[int, Failure] | None = None) -> dict[str, Array]:
        """Feed `number`, in which the failing operators do what `failures` says, by default nothing."""
        generator = np.random.default_rng(number)
        rows = self.batches[number % len(self.batches)]
        switches = np.zeros(max(1, self.failing), np.int32)
        for position, failure in (failures or {}).items():
            switches[position] = failure
        feeds: dict[str, Array] = {}
        for name, info in self.inputs.items():
            if name == _SWITCHES:
                feeds[name] = switches
            elif name == _COUNTS:
                feeds[name] = generator.integers(0, rows + 1, 1).astype(np.int64)
            else:
                assert info.shape is not None
                feeds[name] = generator.standard_normal((rows, *info.shape[1:]), np.float32)  # type: ignore[arg-type]
        return feeds


def random_net(source: random.Random, options: RandomNetOptions | None = None) -> RandomNet:
    """A net that `source` decides: the same state gives the same net."""
    return _Builder(source, options or RandomNetOptions()).build()


def without_devices(net: NetDef) -> NetDef:
    """The same net with nothing said about devices."""
    plain = NetDef()
    plain.CopyFrom(net)
    plain.ClearField("device_option")
    for definition in plain.op:
        definition.ClearField("device_option")
    return plain


def features_of(net: NetDef) -> Counter[str]:
    """How often each feature occurs in `net`, read from the def alone."""
    graph = build_graph(net)
    counts: Counter[str] = Counter()
    writers = Counter(name for definition in net.op for name in definition.output)
    counts["operators"] = len(net.op)
    counts["blobs with several writers"] = sum(1 for count in writers.values() if count > 1)
    counts["write-after-read edges"] = sum(1 for hazard in graph.hazards.values() if Hazard.WAR in hazard)
    counts["write-after-write edges"] = sum(1 for hazard in graph.hazards.values() if Hazard.WAW in hazard)
    counts["views"] = len(graph.views)
    counts["operators in pieces"] = sum(definition.type == PIECED_OPERATOR for definition in net.op)
    counts["failing operators"] = sum(definition.type == FAILING_OPERATOR for definition in net.op)
    devices = Counter(str(graph.device(index)) for index in range(len(graph)))
    counts["nets on several devices"] = int(len(devices) > 1)
    for device, count in devices.items():
        counts[f"operators on {device}"] = count
    for definition in net.op:
        arguments = {argument.name: argument.i for argument in definition.arg}
        counts["in-place writes"] += bool(set(definition.input) & set(definition.output))
        counts["control edges"] += len(definition.control_input)
        counts["convolutions"] += definition.type == "Conv"
        counts["convolutions on the shared buffer"] += bool(arguments.get("shared_buffer"))
        counts["operators with a library state"] += "cudnn_state" in arguments
        counts["operators with shapes from values"] += bool(schema_of(definition.type).values_read(node_of(definition)))
    return counts


@dataclass(frozen=True)
class _Kind:
    """What all blobs of one shape have in common: the axes after the first, and whose rows they have."""

    rows: str
    axes: tuple[int, ...]
    integers: bool = False


_MATRIX = _Kind("batch", (_WIDTH,))
_IMAGES = _Kind("batch", _IMAGE)
_FLAT = _Kind("batch", (_PIXELS,))
_HALF = _Kind("batch", (_WIDTH // 2,))
_VECTOR = _Kind("one", ())
_BOUND = _Kind("bound", (), integers=True)


class _Builder:
    """A net under construction: which blobs exist, and of what kind they are at this point of the list."""

    def __init__(self, source: random.Random, options: RandomNetOptions) -> None:
        self._random = source
        self._options = options
        self._net = NetDef(name=f"stress{source.randrange(1 << 20):05x}")
        if options.devices[0] != "cpu":
            self._net.device_option.CopyFrom(Device.parse(options.devices[0]).to_option())
        self._kinds: dict[str, _Kind] = {}
        self._parameters: dict[str, Array] = {}
        self._inputs: dict[str, InputInfo] = {}
        self._blobs = self._cuts = self._failing = 0
        self._recent = source.choice([0.0, 0.3, 0.9])  # how deep the net is: how often the newest blob is read
        self._overwriting = source.choice([0.1, 0.25, 0.5])
        self._device = source.choice(options.devices)
        self._changing = source.random() < 0.3  # blobs change their shape within a run
        self._sticking = source.choice([0.3, 0.7, 0.95])

    def build(self) -> RandomNet:
        """Draw the net."""
        self._make_blobs()
        length = self._random.choice([1, 3, 8, 15, 25, self._options.most_operators])
        makers = self._makers()
        weights = [weight for weight, _ in makers]
        for _ in range(4 * length):
            if len(self._net.op) >= length:
                break
            self._random.choices(makers, weights)[0][1]()
        if not self._net.op:
            self._unary()
        self._net.external_input.extend([*self._inputs, *self._parameters])
        read = {name for definition in self._net.op for name in definition.input}
        written = list(dict.fromkeys(name for definition in self._net.op for name in definition.output))
        outputs = [name for name in written if name not in read or self._random.random() < 0.5] or written[:1]
        self._net.external_output.extend(outputs)
        batches = tuple(self._random.choice([1, 2, 3, 5, 17]) for _ in range(self._random.choice([1, 1, 2, 3, 6])))
        return RandomNet(
            self._net, self._parameters, self._inputs, tuple(outputs), batches, self._failing, features_of(self._net)
        )

    def _make_blobs(self) -> None:
        values = np.random.default_rng(self._random.randrange(1 << 30))

        def parameter(name: str, *shape: int) -> None:
            self._parameters[name] = (0.5 * values.standard_normal(shape)).astype(np.float32)

        for number in range(self._random.randint(1, 3)):
            self._add_input(f"x{number}", _MATRIX)
        if self._random.random() < 0.6:
            self._add_input("image", _IMAGES)
        self._inputs[_COUNTS] = InputInfo(dtypes.INT64, (1,))
        self._kinds[_COUNTS] = _BOUND
        self._inputs[_SWITCHES] = InputInfo(dtypes.INT32, None)
        parameter("square", _WIDTH, _WIDTH)
        parameter("widen", _PIXELS, _WIDTH)
        parameter("narrow", _WIDTH, _PIXELS)
        parameter("bias", _WIDTH)
        parameter("wide_bias", _PIXELS)
        parameter("filter", 2, 2, 3, 3)
        parameter("filter_bias", 2)
        parameter("scale", _WIDTH)
        self._parameters["zero"] = np.zeros(1, np.int64)
        self._kinds["scale"] = self._kinds["bias"] = _VECTOR

    def _add_input(self, name: str, kind: _Kind) -> None:
        self._inputs[name] = InputInfo(dtypes.FLOAT32, (None, *kind.axes))
        self._kinds[name] = kind

    def _makers(self) -> Sequence[tuple[float, Callable[[], None]]]:
        return [
            (5, self._unary),
            (2, self._pieced),
            (5, self._binary),
            (2, self._many),
            (2, self._scaled),
            (2, self._fully_connected),
            (1.5, self._view),
            (4, self._image),
            (1, self._into_image),
            (1, self._halves),
            (2, self._dynamic),
            (1, self._sum_of_rows),
            (1, self._may_fail),
        ]

    def _source(self, wanted: Callable[[_Kind], bool]) -> str | None:
        """A blob of a kind that is `wanted`: often the newest, else any; None when there is none."""
        fitting = [name for name, kind in self._kinds.items() if wanted(kind)]
        if not fitting:
            return None
        return fitting[-1] if self._random.random() < self._recent else self._random.choice(fitting)

    def _floats(self) -> str:
        name = self._source(lambda kind: not kind.integers)
        assert name is not None
        return name

    def _like(self, name: str) -> str:
        blob = self._source(lambda kind: kind == self._kinds[name])
        assert blob is not None
        return blob

    def _target(self, op_type: str, inputs: Sequence[str], kind: _Kind) -> str:
        """A blob to write: an input in place, an older one, which need not have been of this `kind`, or a new one."""
        chance = self._random.random()
        allowed = schema_of(op_type).inplace
        same = [
            name
            for name in dict.fromkeys(inputs)
            if self._kinds.get(name) == kind
            and self._may_write(name)
            and all(allowed(index, 0) for index, other in enumerate(inputs) if other == name)
        ]
        if same and chance < 0.25:
            return self._random.choice(same)
        if chance < 0.25 + self._overwriting:
            changing = self._changing and self._random.random() < 0.1
            old = [
                name
                for name, present in self._kinds.items()
                if name not in inputs
                and self._may_write(name)
                and (present == kind or (changing and name.startswith("y") and present.integers == kind.integers))
            ]
            if old:
                return self._random.choice(old)
        return self._new_blob()

    def _new_blob(self) -> str:
        self._blobs += 1
        return f"y{self._blobs}"

    def _may_write(self, name: str) -> bool:
        return name not in self._parameters or self._options.stateful

    def _add(
        self,
        op_type: str,
        inputs: Sequence[str],
        kind: _Kind,
        others: Mapping[str, _Kind] | None = None,
        *,
        engine: str = "",
        arguments: Mapping[str, ArgumentValue] | None = None,
    ) -> None:
        """Append an operator whose first output is of `kind`; `others` are its further outputs."""
        outputs = {self._target(op_type, inputs, kind): kind, **(others or {})}
        definition = op(op_type, inputs, list(outputs), engine=engine, arg=arguments)
        if self._random.random() < 0.08:
            definition.control_input.append(self._random.choice([*self._kinds, "nothing"]))
        if len(self._options.devices) > 1:
            if self._random.random() > self._sticking:
                self._device = self._random.choice(self._options.devices)
            definition.device_option.CopyFrom(Device.parse(self._device).to_option())
        self._net.op.append(definition)
        for name, written in outputs.items():
            self._kinds.pop(name, None)  # the newest blob is the last
            self._kinds[name] = written

    def _unary(self) -> None:
        x = self._floats()
        op_type = self._random.choice(["Tanh", "Sigmoid", "Negative", "Relu", "Abs", "Copy", "Softsign", "Clip"])
        arguments: dict[str, ArgumentValue] = {"min": -1.0, "max": 1.0} if op_type == "Clip" else {}
        self._add(op_type, [x], self._kinds[x], arguments=arguments)

    def _pieced(self) -> None:
        x = self._floats()
        self._add(PIECED_OPERATOR, [x], self._kinds[x])

    def _binary(self) -> None:
        a = self._floats()
        self._add(self._random.choice(["Add", "Sub", "Max", "Min", "Mean"]), [a, self._like(a)], self._kinds[a])

    def _many(self) -> None:
        first = self._floats()
        inputs = [first, *(self._like(first) for _ in range(self._random.randint(2, 4)))]
        self._add(self._random.choice(["Max", "Min", "Mean"]), inputs, self._kinds[first])

    def _scaled(self) -> None:
        x = self._source(lambda kind: kind.axes == (_WIDTH,))
        vector = self._source(lambda kind: kind == _VECTOR)
        if x is not None and vector is not None:
            self._add(self._random.choice(["Add", "Sub"]), [x, vector], self._kinds[x])

    def _fully_connected(self) -> None:
        x = self._source(lambda kind: kind.axes in ((_WIDTH,), (_PIXELS,)))
        if x is not None:
            weights = "square" if self._kinds[x].axes == (_WIDTH,) else "narrow"
            self._add("FC", [x, weights, "bias"], _Kind(self._kinds[x].rows, (_WIDTH,)))

    def _view(self) -> None:
        x = self._floats()
        kind = self._kinds[x]
        op_type = self._random.choice(["StopGradient", "Reshape", "Flatten"])
        if op_type == "Flatten" and kind.axes:
            self._add("Flatten", [x], _FLAT if kind == _IMAGES else kind)
        elif op_type == "Reshape" and kind == _FLAT:
            self._add("Reshape", [x], _IMAGES, self._unread(), arguments={"shape": [0, *_IMAGE]})
        else:
            self._add("StopGradient", [x], kind)

    def _unread(self) -> dict[str, _Kind]:
        """A further output that has a kind to itself."""
        name = self._new_blob()
        return {name: _Kind(name, (), integers=True)}

    def _image(self) -> None:
        x = self._source(lambda kind: kind == _IMAGES)
        if x is None:
            return
        if self._random.random() < 0.3:
            self._add(
                self._random.choice(["MaxPool", "AveragePool"]),
                [x],
                _IMAGES,
                arguments={"kernel": 3, "pad": 1, "stride": 1},
            )
            return
        arguments: dict[str, ArgumentValue] = {"kernel": 3, "pad": 1}
        if self._random.random() < 0.5:
            arguments["shared_buffer"] = 1
        engine = self._random.choice(["", "", "CUDNN", "CUDNN", "WINOGRAD"])
        if engine == "CUDNN":
            arguments["cudnn_state"] = self._random.randrange(LIBRARY_STATES)
        self._add("Conv", [x, "filter", "filter_bias"], _IMAGES, engine=engine, arguments=arguments)

    def _into_image(self) -> None:
        x = self._source(lambda kind: kind == _MATRIX)
        if x is not None:
            self._add("FC", [x, "widen", "wide_bias"], _FLAT)

    def _halves(self) -> None:
        half = self._source(lambda kind: kind == _HALF)
        x = self._source(lambda kind: kind == _MATRIX)
        if half is not None and self._random.random() < 0.5:
            self._add("Concat", [half, self._like(half)], _MATRIX, self._unread(), arguments={"axis": 1})
        elif x is not None:
            self._add("Split", [x], _HALF, {self._new_blob(): _HALF}, arguments={"axis": 1})

    def _dynamic(self) -> None:
        x = self._source(lambda kind: kind.axes == (_WIDTH,))
        bound = self._source(lambda kind: kind == _BOUND)
        if x is None or bound is None:
            return
        self._cuts += 1
        if self._random.random() < 0.2:
            self._add("Copy", [bound], _BOUND)
        elif self._kinds[x] == _MATRIX:
            self._add("Slice", [x, "zero", bound], _Kind(f"cut {self._cuts}", (_WIDTH,)))
        else:
            self._add("Tile", [x], _Kind(f"tiles {self._cuts}", (_WIDTH,)), arguments={"tiles": 2, "axis": 0})

    def _sum_of_rows(self) -> None:
        x = self._source(lambda kind: kind.axes == (_WIDTH,))
        if x is not None:
            self._add("ReduceFrontSum", [x], _VECTOR, arguments={"num_reduce_dim": 1})

    def _may_fail(self) -> None:
        x = self._floats()
        self._add(FAILING_OPERATOR, [x, _SWITCHES], self._kinds[x], arguments={"number": self._failing})
        self._failing += 1
