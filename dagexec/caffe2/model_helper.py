"""ModelHelper: a net, the net that fills its parameters, and what is known of these."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from dagexec.caffe2 import scope
from dagexec.caffe2.modeling.initializers import ExternalInitializer
from dagexec.caffe2.modeling.parameter_info import ParameterInfo, ParameterTags
from dagexec.caffe2.modeling.parameter_sharing import shared_name
from dagexec.caffe2.net import Net
from dagexec.caffe2.optimizer_context import optimizer_of
from dagexec.caffe2.references import BlobReference, ScopedName, plain_gradient
from dagexec.core.proto import NetDef
from dagexec.errors import Caffe2Error
from dagexec.training.parameter_gradients import devices_of, with_own_blobs

__all__ = ["ExtractPredictorNet", "ModelHelper"]


class ModelHelper:
    """A net and its init net. Operators are methods, as of a net: `model.Softmax(x, "y")`.

    Attributes:
        name: of the model.
        net: what is run.
        param_init_net: what fills the parameters.
        param_to_grad: the gradient of each parameter, after `AddGradientOperators`.
        arg_scope: arguments that layers of `brew` get from the model.
        init_params: whether layers fill their parameters; without it they are there already.
        gradient_ops_added: whether `AddGradientOperators` was called.
    """

    _devices: list[int]  # these are there behind `data_parallel_model.Parallelize`, and scripts read them
    _device_prefix: str
    _optimizer: Any
    _data_parallel_model_init_nets: list[Net]
    _data_parallel_model_nets: list[Net | tuple[Net, int]]
    _warmup_iterations: int | None

    def __init__(
        self,
        name: str | None = None,
        init_params: bool = True,
        allow_not_known_ops: bool = True,
        skip_sparse_optim: bool = False,
        param_model: ModelHelper | None = None,
        arg_scope: dict[str, Any] | None = None,
    ) -> None:
        """`param_model` is a model whose parameters, and whose init net, this one shares.

        Every operator type is known, so `allow_not_known_ops` and `skip_sparse_optim` change nothing.
        """
        self.name = name or "model"
        self.net = Net(self.name)
        self.init_params = init_params
        self.arg_scope = {"order": "NCHW", **(arg_scope or {})}
        self.gradient_ops_added = False
        self.param_init_net: Net = param_model.param_init_net if param_model else Net(f"{self.name}_init")
        self.param_to_grad: dict[Any, Any] = param_model.param_to_grad if param_model else {}
        self._parameters: dict[str, ParameterInfo] = param_model._parameters if param_model else {}

    def __getattr__(self, op_type: str) -> Callable[..., Any]:
        if op_type.startswith("_") or op_type == "net":
            raise AttributeError(op_type)
        method: Callable[..., Any] = getattr(self.net, op_type)
        return method

    # Parameters

    def create_param(self, param_name: Any, shape: Sequence[int], initializer: Any, tags: Any = None) -> BlobReference:
        """A parameter, filled by the init net; one of that name that is there already is used again.

        Text is a name in the name scope that is open, or stands for another one by `ParameterSharing`. Raises
        ValueError where it is there in another shape.
        """
        full = str(param_name) if isinstance(param_name, BlobReference) else shared_name(ScopedName(param_name))
        info = self._parameters.get(full)
        if info is None:
            blob = BlobReference(full)
            creator = initializer if self.init_params else ExternalInitializer()
            info = self._parameters[full] = creator.create_param(blob, init_net=self.param_init_net, shape=shape)
        elif info.shape is not None and info.shape != tuple(shape):
            raise ValueError(f"model {self.name!r}: parameter {full!r} has shape {info.shape}, not {tuple(shape)}")
        self.AddParameter(info.blob, tags)
        info.optimizer = info.optimizer or optimizer_of(info.tags)
        return info.blob

    def AddParameter(self, param: BlobReference, tags: Any = None) -> None:
        """Let a blob of the init net be a parameter, with these `ParameterTags`."""
        info = self._parameters.setdefault(str(param), ParameterInfo(param))
        info.tags.update([tags] if isinstance(tags, str) else tags or ())

    def AddComputedParam(self, param: BlobReference) -> None:
        """Let a blob be a parameter that training does not change by a gradient."""
        self.AddParameter(param, ParameterTags.COMPUTED_PARAM)

    def _tagged(self, namescope: str | None, wanted: Callable[[set[str]], bool]) -> list[BlobReference]:
        prefix = scope.CurrentNameScope() if namescope is None else namescope
        return [info.blob for info in self._parameters.values() if wanted(info.tags) and info.name.startswith(prefix)]

    def GetParams(self, namescope: str | None = None, top_scope: bool = False) -> list[BlobReference]:
        """The parameters of a name scope, by default of the one that is open, that training changes."""
        found = self._tagged(namescope, lambda tags: ParameterTags.COMPUTED_PARAM not in tags)
        return [blob for blob in found if not top_scope or not blob.GetNameScope()]

    def GetComputedParams(self, namescope: str | None = None) -> list[BlobReference]:
        """The parameters that training does not change by gradients: statistics."""
        return self._tagged(namescope, lambda tags: ParameterTags.COMPUTED_PARAM in tags)

    def GetAllParams(self, namescope: str | None = None) -> list[BlobReference]:
        """All parameters of a name scope."""
        return self.GetParams(namescope) + self.GetComputedParams(namescope)

    @property
    def params(self) -> list[BlobReference]:
        """All parameters that training changes."""
        return self.GetParams("")

    @property
    def computed_params(self) -> list[BlobReference]:
        """All others."""
        return self.GetComputedParams("")

    @property
    def weights(self) -> list[BlobReference]:
        """The parameters that are weights."""
        return self._tagged("", lambda tags: ParameterTags.WEIGHT in tags)

    @property
    def biases(self) -> list[BlobReference]:
        """The parameters that are biases."""
        return self._tagged("", lambda tags: ParameterTags.BIAS in tags)

    def get_parameter_info(self, param: Any) -> ParameterInfo:
        """What is known of a parameter. Raises KeyError."""
        return self._parameters[str(param)]

    # Gradients

    def AddGradientOperators(self, ys: Any, skip: int = 0) -> dict[str, Any]:
        """Append the gradient operators of the losses, and return the gradient of each blob that has one.

        The gradient of each parameter is a blob of its own, which updates may overwrite. Raises Caffe2Error when it is
        called again.
        """
        if self.gradient_ops_added:
            raise Caffe2Error(f"model {self.name!r} has its gradients already: AddGradientOperators is called once")
        forward = len(self.net.Proto().op)
        gradients = self.net.AddGradientOperators(ys, skip)
        self.gradient_ops_added = True
        plain = {str(param): plain_gradient(gradients[str(param)]) for param in self.params if str(param) in gradients}
        trial = NetDef()
        trial.CopyFrom(self.net.Proto())
        behind = len(trial.op)
        owned = with_own_blobs(trial, plain, forward, devices_of(self.param_init_net.Proto()))
        self.net.extend_ops(list(trial.op[behind:]))
        for name, gradient in owned.items():
            info = self._parameters[name]
            info.grad = gradients[name] = self.param_to_grad[info.blob] = self.net._gradient(gradient)
        return gradients

    def GetOptimizationParamInfo(self, params: Iterable[Any] | None = None) -> list[ParameterInfo]:
        """The parameters that have a gradient: all, or those of `params`."""
        chosen = self.params if params is None else params
        return [info for info in (self.get_parameter_info(param) for param in chosen) if info.grad is not None]

    # Nets

    def Proto(self) -> NetDef:
        """The message of the net."""
        return self.net.Proto()

    def InitProto(self) -> NetDef:
        """The message of the init net."""
        return self.param_init_net.Proto()

    def RunAllOnGPU(self, *args: Any, **kwargs: Any) -> None:
        """Have both nets run on a GPU."""
        self.param_init_net.RunAllOnGPU(*args, **kwargs)
        self.net.RunAllOnGPU(*args, **kwargs)

    def CreateDB(self, blob_out: Any, db: str, db_type: str, **kwargs: Any) -> Any:
        """A database of the init net, to be read from."""
        return self.param_init_net.CreateDB([], blob_out, db=db, db_type=db_type, **kwargs)

    def TensorProtosDBInput(
        self, unused_blob_in: Any, blob_out: Any, batch_size: int, db: str, db_type: str, **kwargs: Any
    ) -> Any:
        """Batches from a database; one blob for each tensor of a record."""
        reader_name = "dbreader_" + db
        reader = self.param_init_net.CreateDB([], reader_name, db=db, db_type=db_type)
        return self.net.TensorProtosDBInput([reader], blob_out, batch_size=batch_size, **kwargs)


def ExtractPredictorNet(
    net_proto: NetDef, input_blobs: Iterable[Any], output_blobs: Iterable[Any], device: Any = None
) -> tuple[Net, list[str]]:
    """What of a net computes `output_blobs` from `input_blobs`, and the blobs that it needs besides: parameters."""
    inputs = [str(blob) for blob in input_blobs]
    wanted = [str(blob) for blob in output_blobs]
    part, _ = Net(net_proto).ClonePartial(f"{net_proto.name}_predict", inputs, wanted)
    if device is not None:
        for operator in part.Proto().op:
            operator.device_option.CopyFrom(device)
    return part, [blob for blob in part.Proto().external_input if blob not in inputs]
