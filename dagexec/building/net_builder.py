"""NetBuilder: the nets, blobs and parameters of a model under construction, without any layer.

Layers are in `layers`; `model_builder` puts all of them together.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy.typing as npt

from dagexec.building.fillers import HE, SYNTHETIC, Filler, Initialization
from dagexec.building.scopes import Scopes
from dagexec.core.arguments import ArgumentValue
from dagexec.core.device import Device
from dagexec.core.dtypes import FLOAT32, INT64, TypeMeta, from_numpy
from dagexec.core.model import InputInfo
from dagexec.core.operator_def import op
from dagexec.core.proto import NetDef, OperatorDef
from dagexec.errors import SchemaError

ITERATION = "optimizer_iteration"
"""The blob that counts training steps: int64, one element. Its name is Caffe2's."""

WEIGHT = "weight"
BIAS = "bias"


class NetBuilder:
    """A net and the init net of its parameters.

    Names of new blobs are relative to the name scope. A name that is read is looked for in the innermost name scope
    first and then outwards, as a variable is in nested functions; one that no scope knows is taken as it is.

    Attributes:
        name: of the net; the init net is called `<name>_init`.
        net, init_net: the NetDefs built so far.
        training: whether layers that work otherwise in training do so.
        inputs: what `add_input` declared.
        parameters: names and shapes of the parameters that training changes.
        computed_parameters: names and shapes of those it does not: batch normalization's statistics.
        arrays: the values of parameters that start as arrays, by name.
        states: names and shapes of what updates keep from step to step, such as momentum.
        scopes: those that are open.
    """

    def __init__(
        self,
        name: str,
        *,
        seed: int = 0,
        order: str = "NCHW",
        initialization: Initialization | None = None,
        training: bool = False,
    ) -> None:
        """`order` is NCHW or NHWC and is given to every operator that has one.

        What parameters start from is by default `HE` for training, and else `SYNTHETIC`.
        """
        if order not in ("NCHW", "NHWC"):
            raise SchemaError(f"order must be NCHW or NHWC, found {order!r}")
        self.name = name
        self.net = NetDef(name=name)
        self.init_net = NetDef(name=f"{name}_init")
        self.training = training
        self.inputs: dict[str, InputInfo] = {}
        self.parameters: dict[str, tuple[int, ...]] = {}
        self.computed_parameters: dict[str, tuple[int, ...]] = {}
        self.arrays: dict[str, npt.NDArray[Any]] = {}
        self.states: dict[str, tuple[int, ...]] = {}
        self.scopes = Scopes()
        self._tags: dict[str, frozenset[str]] = {}
        self._written: set[str] = set()
        self._seed = seed
        self._order = order
        self._initialization = initialization or (HE if training else SYNTHETIC)

    @property
    def params(self) -> list[str]:
        """The names of the parameters that training changes, in the order they were made."""
        return list(self.parameters)

    @property
    def weights(self) -> list[str]:
        """The trained parameters tagged as weights."""
        return self.tagged(WEIGHT)

    @property
    def biases(self) -> list[str]:
        """The trained parameters tagged as biases."""
        return self.tagged(BIAS)

    def tagged(self, tag: str) -> list[str]:
        """The parameters with this tag, in the order they were made."""
        return [name for name, tags in self._tags.items() if tag in tags]

    def tags_of(self, parameter: str) -> frozenset[str]:
        """The tags of a parameter. Raises SchemaError when there is no such parameter."""
        if parameter not in self._tags:
            raise SchemaError(f"model {self.name!r}: parameter {parameter!r} does not exist")
        return self._tags[parameter]

    def name_scope(self, prefix: str) -> AbstractContextManager[None]:
        """Names of new blobs begin with `prefix/`."""
        return self.scopes.name_scope(prefix)

    def device_scope(self, device: str | Device) -> AbstractContextManager[None]:
        """New operators, and those that fill new parameters, run on `device`."""
        return self.scopes.device_scope(device)

    def arg_scope(self, *layers: str, **defaults: Any) -> AbstractContextManager[None]:
        """Calls of the layer methods `layers` that leave these arguments out get them from here."""
        return self.scopes.arg_scope(*layers, **defaults)

    def parameter_sharing(self, mapping: Mapping[str, str]) -> AbstractContextManager[None]:
        """Parameters, or those of name scopes, that stand for others: `{"right": "left"}`, `{"b_w": "a_w"}`."""
        return self.scopes.parameter_sharing(mapping)

    def add_input(self, name: str, shape: Sequence[int | None] | None, dtype: TypeMeta | None = FLOAT32) -> str:
        """Declare a blob that is fed before each run. A size of None may be anything, and so may a shape or dtype.

        Raises SchemaError when the name is taken.
        """
        name = self.scopes.scoped(name)
        self._check_new(name)
        self.inputs[name] = InputInfo(dtype, None if shape is None else tuple(shape))
        self.net.external_input.append(name)
        return name

    def add_parameter(
        self,
        name: str,
        shape: Sequence[int],
        filler: Filler,
        dtype: TypeMeta = FLOAT32,
        *,
        trained: bool = True,
        tags: Iterable[str] = (),
    ) -> str:
        """Create a parameter, filled by the init net; or take the one that stands for it in `parameter_sharing`.

        Its random seed comes from the model's seed and its name. Raises SchemaError when the name is taken, or the
        parameter to share has another shape.
        """
        own = self.scopes.scoped(name)
        name = self.scopes.shared(own)
        group = self.parameters if trained else self.computed_parameters
        if name != own and name in group:
            if group[name] != tuple(shape):
                raise SchemaError(
                    f"model {self.name!r}: {own!r} shares parameter {name!r} of shape {group[name]}, "
                    f"but needs shape {tuple(shape)}"
                )
            return name
        self._fill(name, shape, filler, dtype)
        group[name] = tuple(shape)
        self._tags[name] = frozenset(tags)
        return name

    def add_array(self, name: str, array: npt.NDArray[Any], *, trained: bool = True, tags: Iterable[str] = ()) -> str:
        """Create a parameter that starts as `array`, which is not copied. Raises SchemaError when the name is taken.

        The init net, which messages and devices are read from, fills it with zeros.
        """
        name = self.add_parameter(
            name, array.shape, Filler("ConstantFill"), from_numpy(array.dtype), trained=trained, tags=tags
        )
        self.arrays[name] = array
        return name

    def add_state(self, name: str, shape: Sequence[int], filler: Filler, dtype: TypeMeta = FLOAT32) -> str:
        """Create a blob that updates keep from step to step, filled by the init net and saved in checkpoints.

        Raises SchemaError when the name is taken.
        """
        name = self.scopes.scoped(name)
        self._fill(name, shape, filler, dtype)
        self.states[name] = tuple(shape)
        return name

    def iteration(self) -> str:
        """The blob that counts training steps, one int64; on the host and outside all scopes. Made by the first call.

        The init net sets it to 0; the updates of an optimizer add one.
        """
        if ITERATION not in self.states:
            fill = op("ConstantFill", [], [ITERATION], shape=[1], value=0, dtype=INT64.number)
            self._check_new(ITERATION)
            self.init_net.op.append(fill)
            self.init_net.external_output.append(ITERATION)
            self.net.external_input.append(ITERATION)
            self.states[ITERATION] = (1,)
        return ITERATION

    def add_operator(
        self, op_type: str, inputs: Sequence[str], outputs: Sequence[str], **arguments: ArgumentValue
    ) -> str:
        """Add any operator to the net and return its first output. An output with the name of an input is that blob.

        Raises SchemaError for an output that is a parameter or a state which the operator does not read.
        """
        read = [self.blob(name) for name in inputs]
        in_place = dict(zip(inputs, read, strict=True))
        written = [in_place.get(name) or self.scopes.scoped(name) for name in outputs]
        for name in written:
            if name not in read and any(name in group for group in self._kept()):
                raise SchemaError(
                    f"model {self.name!r}: {op_type} would overwrite {name!r}, which is a parameter or a state; "
                    f"choose another name for its output"
                )
        definition = op(op_type, read, written, arg=arguments)
        self._place(definition)
        self.net.op.append(definition)
        self._written.update(written)
        return written[0]

    def add_definition(self, definition: OperatorDef) -> None:
        """Add an operator as it is, whose names are those of blobs."""
        self.net.op.append(definition)
        self._written.update(definition.output)

    def seed_of(self, name: str) -> int:
        """The random seed of what is called `name`: it depends on the model's seed and the name alone."""
        return zlib.crc32(f"{self._seed}/{name}".encode())

    def blob(self, name: str) -> str:
        """The full name of what `name` stands for in the name scopes that are open."""
        return next((full for full in self.scopes.candidates(name) if self._exists(full)), name)

    def _fill(self, name: str, shape: Sequence[int], filler: Filler, dtype: TypeMeta = FLOAT32) -> None:
        """Have the init net make `name`. Raises SchemaError when the name is taken."""
        self._check_new(name)
        arguments: dict[str, ArgumentValue] = {"shape": list(shape), **filler.arguments}
        if dtype is not FLOAT32:
            arguments["dtype"] = dtype.number
        definition = op(filler.type, [], [name], arg=arguments)
        self._place(definition)
        definition.device_option.random_seed = self.seed_of(name)
        self.init_net.op.append(definition)
        self.init_net.external_output.append(name)
        self.net.external_input.append(name)

    def _weight(self, blob_out: str, shape: Sequence[int], fan_in: int, filler: Filler | None) -> str:
        chosen = filler or self._initialization.weight(fan_in)
        return self.add_parameter(f"{blob_out}_w", shape, chosen, tags=(WEIGHT,))

    def _bias(self, blob_out: str, size: int, filler: Filler | None) -> str:
        return self.add_parameter(f"{blob_out}_b", [size], filler or self._initialization.bias, tags=(BIAS,))

    def _order_argument(self) -> dict[str, ArgumentValue]:
        return {} if self._order == "NCHW" else {"order": self._order}

    def _place(self, definition: OperatorDef) -> None:
        if self.scopes.device is not None:
            definition.device_option.CopyFrom(self.scopes.device.to_option())

    def _exists(self, name: str) -> bool:
        return name in self._written or any(name in group for group in self._declared())

    def _check_new(self, name: str) -> None:
        if self._exists(name):
            raise SchemaError(f"model {self.name!r}: blob {name!r} already exists")

    def _declared(self) -> Iterable[Collection[str]]:
        return (self.inputs, *self._kept())

    def _kept(self) -> Iterable[Collection[str]]:
        return (self.parameters, self.computed_parameters, self.states)
