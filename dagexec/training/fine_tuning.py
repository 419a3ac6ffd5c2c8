"""fine_tune: a model that was loaded, as a model helper that trains it.

helper = fine_tune(dagexec.load_model("model.onnx"), loss, SGD(0.01))

Weights are told from other constants by what they are and where they are read, as model files do not say which of their
arrays were trained.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dagexec.binding.parameters import initialized
from dagexec.building.net_builder import WEIGHT
from dagexec.core.dtypes import from_numpy
from dagexec.core.model import Model
from dagexec.core.node import Node, new_node
from dagexec.core.proto import DeviceOption
from dagexec.errors import SchemaError
from dagexec.platform.records import dataclass
from dagexec.training.model_helper import ModelHelper
from dagexec.training.optimizer import Optimizer

__all__ = ["add_model", "fine_tune"]

Array = npt.NDArray[Any]

_MASKED = 1e30
"""Numbers from here on are a mask's minus infinity and no weights."""

_STATES: Mapping[str, Sequence[int]] = {"SpatialBN": (3, 4), "GRU": (4, 5), "LSTM": (4, 5, 6), "RNN": (4, 5)}
"""The inputs of operators that are statistics and states, and no weights."""


def fine_tune(
    model: Model,
    loss: str | Callable[[ModelHelper], str],
    optimizer: Optimizer,
    *,
    parameters: Collection[str] | None = None,
    seed: int = 0,
) -> ModelHelper:
    """A model helper that trains `model`, from the values that its parameters have.

        def loss(helper):
            label = helper.add_input("label", (32,), dagexec.operators.INT32)
            return helper.softmax_with_loss("scores", label)[1]

        helper = fine_tune(dagexec.load_model("model.onnx"), loss, SGD(0.01, momentum=0.9))
        helper.create(workspace)

    `loss` is a blob of the model, one number that is made small; or a function that adds the layers of the loss to the
    helper and returns its name. What is trained, and how layers work in training, is described by `add_model`; a
    parameter that is not named in `parameters`, and that no gradient reaches, stays as it is. Random numbers of dropout
    follow from `seed`.
    Raises SchemaError for a parameter that the model does not have, and what `ModelHelper.add_gradient_operators` and
    `Optimizer.add_updates` raise.
    """
    helper = ModelHelper(model.name, seed=seed, training=True)
    add_model(helper, model, parameters)
    made = loss if isinstance(loss, str) else loss(helper)
    helper.add_gradient_operators([made], without=helper.params if parameters is None else ())
    optimizer.add_updates(helper)
    return helper


def add_model(helper: ModelHelper, model: Model, parameters: Collection[str] | None = None) -> None:
    """Add the inputs, parameters and operators of a model that was loaded to `helper`, in the form for training.

    `parameters` are those to train. By default that are all arrays of floats with more than one element, but for the
    statistics of batch normalization, the states that recurrent layers begin with, and masks, which have infinite or
    huge numbers. Batch normalization takes the statistics of the batch and keeps running ones; dropout drops.
    An ONNX model computes some of its weights from others when it is loaded; here each step does, so that what is
    trained are the arrays of the file. Those of up to 64 elements it has computed already: then the result is trained.
    Raises SchemaError for names that are not there, or that the helper has already.
    """
    split = _split(model, parameters)
    nodes = [*split.derived, *model.program.op]
    for name, info in model.inputs.items():
        helper.add_input(name, info.shape, info.dtype)
    for name in dict.fromkeys(name for node in nodes for name in node.input):
        if name in split.values and name not in model.inputs:
            array, trained = split.values[name], name in split.trained
            helper.add_array(name, array, trained=trained, tags=[WEIGHT] * (trained and array.ndim > 1))
    for node in _in_training_form(helper, nodes, split.values):
        helper.add_definition(node.message())


@dataclass(frozen=True)
class _Split:
    """The arrays of a model, and which of them are trained.

    Attributes:
        values: all arrays, those that the init net makes too.
        trained: the names of those to train.
        derived: the operators of the init net whose results follow from them.
    """

    values: Mapping[str, Array]
    trained: frozenset[str]
    derived: tuple[Node, ...]


def _split(model: Model, parameters: Collection[str] | None) -> _Split:
    """Decide what is trained."""
    values = initialized(model).parameters
    nodes = (*model.init_program.op, *model.program.op)
    states = {node.input[i] for node in nodes for i in _STATES.get(node.type, ()) if i < len(node.input)}

    def is_trained(name: str) -> bool:
        if parameters is not None:
            return name in parameters
        return name not in states and name not in model.inputs and _may_be_weight(values[name])

    trained = {name for name in model.parameters if is_trained(name)}
    derived: list[Node] = []
    moved: set[str] = set()
    for node in model.init_program.op:
        if trained.isdisjoint(node.input) and moved.isdisjoint(node.input):
            trained.update(name for name in node.output if name in values and is_trained(name))
        else:
            derived.append(node)
            moved.update(node.output)
    unknown = sorted(set(parameters or ()) - trained)
    if unknown:
        raise SchemaError(f"model {model.name!r}: {unknown} are not parameters of it; there are {sorted(values)[:20]}")
    kept = {name: array for name, array in values.items() if name not in moved}
    return _Split(kept, frozenset(trained), tuple(derived))


def _may_be_weight(array: Array) -> bool:
    if from_numpy(array.dtype).is_float and array.size > 1:
        return bool(np.abs(array).max() < _MASKED)  # false for NaN, too
    return False


def _in_training_form(helper: ModelHelper, nodes: Iterable[Node], values: Mapping[str, Array]) -> Iterable[Node]:
    """The operators as they work in training."""
    statistics: dict[str, str] = {}
    nodes = list(nodes)
    updated = {name for node in nodes if node.type == "SpatialBN" for name in node.input[3:5]}
    for node in nodes:
        if node.type == "Copy" and node.input[0] in values and node.output[0] in updated:
            statistics[node.output[0]] = node.input[0]  # ONNX's form of training, whose inputs stay as they are
        elif node.type == "SpatialBN":
            yield _batch_normalization(node, statistics)
        elif node.type in ("Dropout", "RandomDropout"):
            yield _dropout(helper, node, values)
        else:
            yield node


def _batch_normalization(node: Node, statistics: Mapping[str, str]) -> Node:
    running = [statistics.get(name, name) for name in node.input[3:5]]
    saved = [*node.output[3:], *(f"{node.output[0]}/{name}" for name in ("saved_mean", "saved_deviation"))][:2]
    inputs, outputs = [*node.input[:3], *running], [node.output[0], *running, *saved]
    return node.changed(inputs=inputs, outputs=outputs, arguments={"is_test": 0})


def _dropout(helper: ModelHelper, node: Node, values: Mapping[str, Array]) -> Node:
    """Dropout by the counter of steps, in place of one that passes all on, or that has its ratio as an input."""
    ratio: Any = node.values.get("ratio", 0.5)
    if node.type == "RandomDropout":
        ratio = values[node.input[2]].item() if len(node.input) > 2 else 0.5
    mask = node.output[1] if len(node.output) > 1 else f"{node.output[0]}/mask"
    inputs, outputs = [node.input[0], helper.iteration()], [node.output[0], mask]
    made = new_node("Dropout", inputs, outputs, ratio=float(ratio), is_test=0)
    return made.changed(device_option=DeviceOption(random_seed=helper.seed_of(node.output[0])))
