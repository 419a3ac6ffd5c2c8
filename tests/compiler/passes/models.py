"""Small models for the tests of passes, and what a pass must leave as it was."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dagexec.compiler.passes import Pass
from dagexec.core.dtypes import FLOAT32
from dagexec.core.graph import build_graph
from dagexec.core.model import InputInfo, Model
from dagexec.core.proto import NetDef, OperatorDef
from dagexec.core.workspace import Workspace
from tests.ops.running import operator_def

Array = npt.NDArray[Any]
op = operator_def

_random = np.random.default_rng(5)


def reseed(seed: int) -> None:
    """Have `normal` draw as `seed` says."""
    global _random
    _random = np.random.default_rng(seed)


def normal(*shape: int, scale: float = 1.0) -> Array:
    """Normal random numbers."""
    return (_random.standard_normal(shape) * scale).astype(np.float32)


def model_of(
    operators: Iterable[OperatorDef],
    outputs: str | Sequence[str] = "y",
    inputs: Mapping[str, tuple[int | None, ...]] | None = None,
    **parameters: Array,
) -> Model:
    """A model with input `x` of shape (2, 4, 6, 6), unless `inputs` says otherwise."""
    shapes = {"x": (2, 4, 6, 6)} if inputs is None else inputs
    net = NetDef(name="net", op=list(operators), external_input=[*shapes, *parameters])
    given = {name: InputInfo(FLOAT32, shape) for name, shape in shapes.items()}
    return Model("model", net, None, parameters, given, (outputs,) if isinstance(outputs, str) else tuple(outputs))


def feeds_for(model: Model, seed: int = 0) -> dict[str, Array]:
    """Random inputs; a free axis is 2."""
    random = np.random.default_rng(seed)
    return {
        name: random.standard_normal([2 if size is None else size for size in info.shape or ()]).astype(np.float32)
        for name, info in model.inputs.items()
    }


def outputs_of(
    model: Model, feeds: Mapping[str, Array], order: Sequence[int] | None = None, runs: int = 2
) -> dict[str, Array]:
    """The outputs of the last of so many runs by the default engines, operators in list order or in `order`."""
    net = NetDef()
    net.CopyFrom(model.net)
    if order is not None:
        operators = [model.net.op[index] for index in order]
        del net.op[:]
        net.op.extend(operators)
    workspace = Workspace()
    for name, array in model.parameters.items():
        workspace.adopt_blob(name, array)
    for name in model.inputs:
        workspace.create_blob(name)
    built = workspace.build_net(net, "simple")
    try:
        for _ in range(runs):
            for name in model.inputs:
                workspace.feed_blob(name, feeds[name])
            built.run()
    finally:
        built.close()
    return {name: workspace.fetch_blob(name) for name in model.outputs}


def other_order(model: Model) -> list[int]:
    """An order of the operators that the net's hazards allow: always the last of those that may go next."""
    graph = build_graph(model.net, (model.parameters.keys() | model.inputs.keys()).__contains__)
    waiting = [len(row) for row in graph.parents]
    ready = [index for index, count in enumerate(waiting) if count == 0]
    order = []
    while ready:
        index = ready.pop()
        order.append(index)
        for child in graph.children[index]:
            waiting[child] -= 1
            if waiting[child] == 0:
                ready.append(child)
    assert len(order) == len(graph)
    return order


def assert_close(got: Mapping[str, Array], wanted: Mapping[str, Array], tolerance: float = 1e-5) -> None:
    """Every output within `tolerance` of the largest value wanted."""
    assert got.keys() == wanted.keys()
    for name, array in wanted.items():
        assert got[name].shape == array.shape
        assert got[name].dtype == array.dtype
        largest = float(np.abs(array).max(initial=1e-6)) if array.dtype.kind == "f" else 0.0
        np.testing.assert_allclose(got[name], array, rtol=0, atol=tolerance * largest, err_msg=name)


def rewritten(step: Pass, model: Model) -> list[str]:
    """What is left after `step`, one `Type inputs -> outputs` each; results must be what they were.

    The model itself may not change, and a second application finds nothing.
    """
    before = model.net.SerializeToString(deterministic=True)
    result = step.apply(model)
    assert model.net.SerializeToString(deterministic=True) == before
    feeds = feeds_for(model)
    wanted = outputs_of(model, feeds)
    assert_close(outputs_of(result.model, feeds), wanted)
    assert_close(outputs_of(result.model, feeds, other_order(result.model)), wanted)
    if not result.changes:
        assert result.model is model
    return listed(result.model)


def listed(model: Model) -> list[str]:
    """The operators of a model, one `Type inputs -> outputs` each."""
    return [f"{one.type} {' '.join(one.input)} -> {' '.join(one.output)}" for one in model.net.op]


def types_of(model: Model) -> list[str]:
    """The operator types of a model, in list order."""
    return [one.type for one in model.net.op]


def unchanged(step: Pass, model: Model) -> bool:
    """True when `step` leaves the model alone."""
    result = step.apply(model)
    assert (result.model is model) == (not result.changes)
    return not result.changes


def post_ops(definition: OperatorDef) -> list[str]:
    """Argument `post_ops`."""
    return [text.decode() for argument in definition.arg if argument.name == "post_ops" for text in argument.strings]
