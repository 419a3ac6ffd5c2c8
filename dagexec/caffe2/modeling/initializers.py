"""How parameters start: a filler of an init net, or a value that somebody else gives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dagexec.caffe2.modeling.parameter_info import ParameterInfo
from dagexec.caffe2.net import Net
from dagexec.caffe2.references import BlobReference
from dagexec.core.proto import TensorProto

__all__ = [
    "ExternalInitializer", "Initializer", "PseudoFP16Initializer", "ReversePseudoFP16Initializer", "update_initializer",
]  # fmt: skip


class Initializer:
    """An operator that fills a parameter, such as `Initializer("GaussianFill", std=0.01)`."""

    def __init__(self, operator_name: str | None = None, **kwargs: Any) -> None:
        self.operator_name = operator_name
        self.operator_kwargs = kwargs

    def update(self, operator_name: str, kwargs: dict[str, Any]) -> None:
        """Take this operator where none was named. Raises ValueError where one was."""
        if self.operator_name is not None:
            raise ValueError(f"the initializer has the operator {self.operator_name!r} already")
        self.operator_name, self.operator_kwargs = operator_name, dict(kwargs)

    def create_param(self, param_name: BlobReference, init_net: Net, shape: Sequence[int]) -> ParameterInfo:
        """Add the operator to `init_net`."""
        blob = getattr(init_net, str(self.operator_name))([], param_name, shape=shape, **self.operator_kwargs)
        return ParameterInfo(blob, shape)


class PseudoFP16Initializer(Initializer):
    """A parameter of float16, with a copy in float32, `<param>_fp32`, which optimizers of several precisions update."""

    def create_param(self, param_name: BlobReference, init_net: Net, shape: Sequence[int]) -> ParameterInfo:
        """Fill the copy, and round it."""
        filled = super().create_param(param_name + "_fp32", init_net, shape).blob
        return ParameterInfo(init_net.FloatToHalf(filled, param_name), shape, {TensorProto.FLOAT: filled})


class ReversePseudoFP16Initializer(Initializer):
    """A parameter of float32, with a copy in float16, `<param>_fp16`."""

    def create_param(self, param_name: BlobReference, init_net: Net, shape: Sequence[int]) -> ParameterInfo:
        """Fill the parameter, and round the copy."""
        blob = super().create_param(param_name, init_net, shape).blob
        return ParameterInfo(blob, shape, {TensorProto.FLOAT16: init_net.FloatToHalf(blob, param_name + "_fp16")})


class ExternalInitializer:
    """A parameter that is there already, or comes from elsewhere: the init net does not fill it."""

    def create_param(self, param_name: BlobReference, init_net: Net, shape: Sequence[int]) -> ParameterInfo:
        """Nothing is added to `init_net`."""
        return ParameterInfo(BlobReference(param_name, init_net), shape)


def update_initializer(
    initializer_class: Any,
    operator_name_and_kwargs: tuple[str, dict[str, Any]] | None,
    default: tuple[str, dict[str, Any]],
) -> Any:
    """The initializer of a class, by default `Initializer`, with the operator that is asked for, or else the default.

    Raises ValueError where an operator is asked for both by an initializer and by name.
    """
    name, kwargs = operator_name_and_kwargs or default
    if initializer_class is None:
        return Initializer(name, **kwargs)
    made = initializer_class() if isinstance(initializer_class, type) else initializer_class
    if isinstance(made, Initializer) and (made.operator_name is None or operator_name_and_kwargs):
        made.update(name, kwargs)
    return made
