"""ModelHelper: builds a net and the init net of its parameters layer by layer, with the names Caffe2's brew gives.

A layer method adds operators to `net`, creates its parameters in `init_net` and returns the name of its output:

    helper = ModelHelper("tiny", seed=1)
    x = helper.add_input("data", (1, 3, 8, 8))
    x = helper.conv(x, "conv1", 3, 16, kernel=3, pad=1)
    x = helper.relu(x, x)
    model = helper.model([helper.softmax(helper.fc(x, "pred", 16 * 8 * 8, 10), "softmax")])

A parameter's random seed comes from the helper's seed and the parameter's name, so its values do not depend on which
other parameters there are, or in what order they were made.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence

from dagexec.core.arguments import ArgumentValue, make_argument
from dagexec.core.dtypes import FLOAT32, TypeMeta
from dagexec.core.errors import SchemaError
from dagexec.core.model import InputInfo, Model
from dagexec.core.proto import NetDef, OperatorDef
from dagexec.training.fillers import SYNTHETIC, Filler, Initialization

Pair = int | tuple[int, int]


class ModelHelper:
    """A model under construction.

    Attributes:
        name: of the net; the init net is called `<name>_init`.
        net, init_net: the NetDefs built so far.
        inputs: what `add_input` declared.
        parameters: names and shapes of the parameters that training changes.
        computed_parameters: names and shapes of those it does not: batch normalisation's statistics.
    """

    def __init__(
        self, name: str, *, seed: int = 0, order: str = "NCHW", initialization: Initialization = SYNTHETIC
    ) -> None:
        """`order` is NCHW or NHWC and is given to every operator that has one."""
        if order not in ("NCHW", "NHWC"):
            raise SchemaError(f"order must be NCHW or NHWC, found {order!r}")
        self.name = name
        self.net = NetDef(name=name)
        self.init_net = NetDef(name=f"{name}_init")
        self.inputs: dict[str, InputInfo] = {}
        self.parameters: dict[str, tuple[int, ...]] = {}
        self.computed_parameters: dict[str, tuple[int, ...]] = {}
        self._seed = seed
        self._order = order
        self._initialization = initialization

    def add_input(self, name: str, shape: Sequence[int | None], dtype: TypeMeta = FLOAT32) -> str:
        """Declare a blob that is fed before each run. A size of None may be anything."""
        self._check_new(name)
        self.inputs[name] = InputInfo(dtype, tuple(shape))
        self.net.external_input.append(name)
        return name

    def add_parameter(self, name: str, shape: Sequence[int], filler: Filler, *, trained: bool = True) -> str:
        """Create a parameter, filled by the init net. Raises SchemaError when the name is taken."""
        self._check_new(name)
        option_seed = zlib.crc32(f"{self._seed}/{name}".encode())
        definition = _definition(filler.type, [], [name], {"shape": list(shape), **filler.arguments})
        definition.device_option.random_seed = option_seed
        self.init_net.op.append(definition)
        self.init_net.external_output.append(name)
        self.net.external_input.append(name)
        (self.parameters if trained else self.computed_parameters)[name] = tuple(shape)
        return name

    def add_operator(
        self, op_type: str, inputs: Sequence[str], outputs: Sequence[str], **arguments: ArgumentValue
    ) -> str:
        """Add any operator to the net and return its first output."""
        self.net.op.append(_definition(op_type, inputs, outputs, arguments))
        return outputs[0]

    def conv(
        self,
        blob_in: str,
        blob_out: str,
        dim_in: int,
        dim_out: int,
        kernel: Pair,
        *,
        stride: Pair = 1,
        pad: Pair = 0,
        dilation: Pair = 1,
        group: int = 1,
        bias: bool = True,
        weight_init: Filler | None = None,
        bias_init: Filler | None = None,
    ) -> str:
        """Convolution of `dim_in` to `dim_out` channels: filter `<out>_w` (M x C/group x kH x kW), bias `<out>_b` (M).

        Raises SchemaError when `group` does not divide both channel counts.
        """
        if group < 1 or dim_in % group or dim_out % group:
            raise SchemaError(f"conv {blob_out!r}: {group} groups do not divide {dim_in} and {dim_out} channels")
        kernels = _pair(kernel)
        channels = dim_in // group
        window = [*kernels, channels] if self._order == "NHWC" else [channels, *kernels]
        fan_in = math.prod(window)
        inputs = [blob_in, self._weight(blob_out, [dim_out, *window], fan_in, weight_init)]
        if bias:
            inputs.append(self._bias(blob_out, dim_out, bias_init))
        arguments = {**_window(kernel, stride, pad), **self._order_argument()}
        if group != 1:
            arguments["group"] = group
        if _pair(dilation) != (1, 1):
            arguments["dilations"] = list(_pair(dilation))
        return self.add_operator("Conv", inputs, [blob_out], **arguments)

    def fc(
        self,
        blob_in: str,
        blob_out: str,
        dim_in: int,
        dim_out: int,
        *,
        weight_init: Filler | None = None,
        bias_init: Filler | None = None,
    ) -> str:
        """Fully connected layer over all axes but the first: weights `<out>_w` (dim_out x dim_in), bias `<out>_b`."""
        weight = self._weight(blob_out, [dim_out, dim_in], dim_in, weight_init)
        return self.add_operator("FC", [blob_in, weight, self._bias(blob_out, dim_out, bias_init)], [blob_out])

    def max_pool(
        self, blob_in: str, blob_out: str, kernel: Pair, *, stride: Pair = 1, pad: Pair = 0, ceil_mode: bool = False
    ) -> str:
        """The maximum of each window; with `ceil_mode` a window that reaches over the edge counts too."""
        return self._pool("MaxPool", blob_in, blob_out, _window(kernel, stride, pad), ceil_mode)

    def average_pool(
        self, blob_in: str, blob_out: str, kernel: Pair, *, stride: Pair = 1, pad: Pair = 0, ceil_mode: bool = False
    ) -> str:
        """The mean of each window, over the elements that are inside the image."""
        return self._pool("AveragePool", blob_in, blob_out, _window(kernel, stride, pad), ceil_mode)

    def global_average_pool(self, blob_in: str, blob_out: str) -> str:
        """The mean of each channel."""
        return self._pool("AveragePool", blob_in, blob_out, {"global_pooling": 1}, False)

    def relu(self, blob_in: str, blob_out: str) -> str:
        """max(x, 0); may be in place."""
        return self.add_operator("Relu", [blob_in], [blob_out])

    def clip(self, blob_in: str, blob_out: str, low: float, high: float) -> str:
        """x limited to [low, high]; may be in place. ReLU6 is 0 to 6."""
        return self.add_operator("Clip", [blob_in], [blob_out], min=float(low), max=float(high))

    def spatial_bn(
        self,
        blob_in: str,
        blob_out: str,
        dim_in: int,
        *,
        epsilon: float = 1e-5,
        momentum: float = 0.9,
        is_test: bool = True,
        scale_init: Filler | None = None,
    ) -> str:
        """Batch normalisation per channel: scale `<out>_s`, shift `<out>_b`, mean `<out>_rm`, variance `<out>_riv`.

        With `is_test` the stored statistics are used; else those of the batch, and the stored ones are updated.
        """
        init = self._initialization
        shape = [dim_in]
        learnt = [
            self.add_parameter(f"{blob_out}_s", shape, scale_init or init.scale),
            self.add_parameter(f"{blob_out}_b", shape, init.shift),
        ]
        statistics = [
            self.add_parameter(f"{blob_out}_rm", shape, init.mean, trained=False),
            self.add_parameter(f"{blob_out}_riv", shape, init.variance, trained=False),
        ]
        outputs = [blob_out] if is_test else [blob_out, *statistics, f"{blob_out}_sm", f"{blob_out}_siv"]
        arguments: dict[str, ArgumentValue] = {"is_test": int(is_test), "epsilon": epsilon, **self._order_argument()}
        if not is_test:
            arguments["momentum"] = momentum
        return self.add_operator("SpatialBN", [blob_in, *learnt, *statistics], outputs, **arguments)

    def lrn(
        self, blob_in: str, blob_out: str, *, size: int = 5, alpha: float = 1e-4, beta: float = 0.75, bias: float = 1.0
    ) -> str:
        """Local response normalisation across channels (Krizhevsky et al. 2012, with alpha divided by the size)."""
        return self.add_operator(
            "LRN", [blob_in], [blob_out], size=size, alpha=alpha, beta=beta, bias=bias, **self._order_argument()
        )

    def dropout(self, blob_in: str, blob_out: str, *, ratio: float = 0.5, is_test: bool = True) -> str:
        """With `is_test` the input itself; else a share `ratio` of elements set to zero, with mask `_<out>_mask`."""
        outputs = [blob_out] if is_test else [blob_out, f"_{blob_out}_mask"]
        return self.add_operator("Dropout", [blob_in], outputs, ratio=ratio, is_test=int(is_test))

    def softmax(self, blob_in: str, blob_out: str) -> str:
        """Softmax over all axes but the first."""
        return self.add_operator("Softmax", [blob_in], [blob_out])

    def concat(self, blobs_in: Sequence[str], blob_out: str) -> str:
        """Channels of several blobs behind each other; their counts go to `_<out>_concat_dims`."""
        outputs = [blob_out, f"_{blob_out}_concat_dims"]
        return self.add_operator("Concat", blobs_in, outputs, order=self._order)

    def sum(self, blobs_in: Sequence[str], blob_out: str) -> str:
        """The sum of blobs; may overwrite the first."""
        return self.add_operator("Sum", blobs_in, [blob_out])

    def flatten(self, blob_in: str, blob_out: str) -> str:
        """All axes but the first as one."""
        return self.add_operator("Flatten", [blob_in], [blob_out])

    def model(self, outputs: Sequence[str]) -> Model:
        """The model built so far, with these outputs. Later changes to the helper do not reach it.

        Raises SchemaError for an output that no operator writes.
        """
        written = {blob for operator in self.net.op for blob in operator.output}
        missing = [blob for blob in outputs if blob not in written]
        if missing:
            raise SchemaError(f"model {self.name!r}: no operator writes {missing}")
        net, init_net = NetDef(), NetDef()
        net.CopyFrom(self.net)
        init_net.CopyFrom(self.init_net)
        net.external_output.extend(outputs)
        return Model(self.name, net, init_net, inputs=dict(self.inputs), outputs=tuple(outputs))

    def _weight(self, blob_out: str, shape: list[int], fan_in: int, filler: Filler | None) -> str:
        return self.add_parameter(f"{blob_out}_w", shape, filler or self._initialization.weight(fan_in))

    def _bias(self, blob_out: str, size: int, filler: Filler | None) -> str:
        return self.add_parameter(f"{blob_out}_b", [size], filler or self._initialization.bias)

    def _pool(
        self, op_type: str, blob_in: str, blob_out: str, window: dict[str, ArgumentValue], ceil_mode: bool
    ) -> str:
        arguments = {**window, **self._order_argument()}
        if ceil_mode:
            arguments["ceil_mode"] = 1
        return self.add_operator(op_type, [blob_in], [blob_out], **arguments)

    def _order_argument(self) -> dict[str, ArgumentValue]:
        return {} if self._order == "NCHW" else {"order": self._order}

    def _check_new(self, name: str) -> None:
        if name in self.inputs or name in self.parameters or name in self.computed_parameters:
            raise SchemaError(f"model {self.name!r}: blob {name!r} exists already")


def _definition(
    op_type: str, inputs: Sequence[str], outputs: Sequence[str], arguments: dict[str, ArgumentValue]
) -> OperatorDef:
    definition = OperatorDef(type=op_type, input=inputs, output=outputs)
    definition.arg.extend(make_argument(name, value) for name, value in arguments.items())
    return definition


def _pair(value: Pair) -> tuple[int, int]:
    return value if isinstance(value, tuple) else (value, value)


def _window(kernel: Pair, stride: Pair, pad: Pair) -> dict[str, ArgumentValue]:
    """The arguments of a sliding window, in Caffe2's short form where height and width agree."""
    if all(isinstance(value, int) for value in (kernel, stride, pad)):
        return {"kernel": int(_pair(kernel)[0]), "stride": int(_pair(stride)[0]), "pad": int(_pair(pad)[0])}
    return {"kernels": list(_pair(kernel)), "strides": list(_pair(stride)), "pads": list(_pair(pad) * 2)}
