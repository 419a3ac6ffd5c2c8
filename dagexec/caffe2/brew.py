"""brew: the layers of models, with arguments from the scopes that are open: `brew.fc(model, x, "y", 4, 3)`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any

from dagexec.caffe2.helpers import control, dense, images, training
from dagexec.caffe2.model_helper import ModelHelper

__all__ = [
    "Register", "accuracy", "add_weight_decay", "arg_scope", "average_pool", "concat", "cond", "conv", "conv_nd",
    "conv_transpose", "db_input", "depth_concat", "dropout", "fc", "group_conv", "has_helper", "image_input",
    "instance_norm", "iter", "layer_norm", "loop", "lrn", "max_pool", "prelu", "relu", "softmax", "spatial_bn",
    "sum", "tanh", "transpose",
]  # fmt: skip

Helper = Callable[..., Any]

_helpers: dict[str, Helper] = {}
_NOTHING: Mapping[str, dict[str, Any]] = MappingProxyType({})
_scope: ContextVar[Mapping[str, dict[str, Any]]] = ContextVar("arg_scope", default=_NOTHING)


def _with_scopes(helper: Helper, name: str) -> Helper:
    """The helper, to which the model and the scopes give what a call leaves out.

    Of the model's arguments it gets those that it names; those of `arg_scope` are meant for it.
    """
    declared = frozenset(inspect.signature(helper).parameters)

    @functools.wraps(helper)
    def call(model: ModelHelper, *args: Any, **kwargs: Any) -> Any:
        of_model = {key: value for key, value in model.arg_scope.items() if key in declared}
        return helper(model, *args, **{**of_model, **_scope.get().get(name, {}), **kwargs})

    return call


def Register(helper: Helper) -> Helper:
    """Make a function of a model a layer of `brew`, under its own name. Raises ValueError where there is one."""
    name = helper.__name__
    if name in _helpers:
        raise ValueError(f"brew has a helper {name!r} already")
    made = _helpers[name] = _with_scopes(helper, name)
    globals()[name] = made
    return made


def has_helper(name: str) -> bool:
    """True when `brew` has a layer of that name."""
    return name in _helpers


@contextmanager
def arg_scope(op_names: str | list[str], **kwargs: Any) -> Iterator[None]:
    """Calls inside, of the layers `op_names`, that leave these arguments out get them from here.

    Raises ValueError for a layer that does not exist.
    """
    names = [op_names] if isinstance(op_names, str) else list(op_names)
    unknown = sorted(name for name in names if name not in _helpers)
    if unknown:
        raise ValueError(f"brew has no helpers {unknown}; it has {sorted(_helpers)}")
    before = _scope.get()
    token = _scope.set({**before, **{name: {**before.get(name, {}), **kwargs} for name in names}})
    try:
        yield
    finally:
        _scope.reset(token)


accuracy = Register(training.accuracy)
add_weight_decay = Register(training.add_weight_decay)
average_pool = Register(images.average_pool)
concat = Register(dense.concat)
cond = Register(control.cond)
conv = Register(images.conv)
conv_transpose = Register(images.conv_transpose)
db_input = Register(training.db_input)
depth_concat = Register(dense.depth_concat)
dropout = Register(dense.dropout)
fc = Register(dense.fc)
group_conv = Register(images.group_conv)
image_input = Register(training.image_input)
instance_norm = Register(images.instance_norm)
iter = Register(training.iter)
layer_norm = Register(dense.layer_norm)
loop = Register(control.loop)
lrn = Register(images.lrn)
max_pool = Register(images.max_pool)
prelu = Register(dense.prelu)
relu = Register(dense.relu)
softmax = Register(dense.softmax)
spatial_bn = Register(images.spatial_bn)
sum = Register(dense.sum)
tanh = Register(dense.tanh)
transpose = Register(dense.transpose)
conv_nd = conv
