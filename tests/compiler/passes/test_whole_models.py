"""All passes on well-known networks: the same results, fewer operators, and nothing left to do."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace

import numpy as np
import pytest

from dagexec import zoo
from dagexec.binding.parameters import initialized
from dagexec.compiler.passes import PassReport, run_passes
from dagexec.compiler.passes.catalog import GRAPH_PASSES
from dagexec.core.model import Model
from dagexec.executor.source.loading import load_model
from tests import models as light
from tests.compiler.passes.models import Array, assert_close, feeds_for, other_order, outputs_of, types_of

_SMALL = {
    "zoo:densenet121", "zoo:googlenet", "zoo:inception_v3", "zoo:mobilenet_v2", "zoo:nasnet_a", "zoo:resnet50",
    "zoo:squeezenet", "zoo:squeezenet_towers",
}  # fmt: skip
"""Zoo models that end in global pooling, so that smaller images do."""

_LARGE = {
    "bvlc_alexnet", "densenet121", "resnet50", "vgg19", "zfnet512", "zoo:inception_v3", "zoo:nasnet_a",
    "zoo:resnet50", "zoo:vgg19",
}  # fmt: skip
"""Models that take half a second and more to make."""

_LEFT = {
    "densenet121": {"Conv": 62, "FusedConv": 59, "FusedElementwise": 62, "Concat": 58, "AveragePool": 4, "MaxPool": 1},
    "inception_v2": {
        "FusedConv": 69, "Concat": 10, "AveragePool": 8, "MaxPool": 5, "Reshape": 1, "FC": 1,
        "Softmax": 1,
    },
    "resnet50": {"FusedConv": 49, "Conv": 4, "AveragePool": 1, "MaxPool": 1, "Reshape": 1, "FC": 1, "Softmax": 1},
    "shufflenet": {
        "FusedConv": 33, "Conv": 16, "ChannelShuffle": 16, "AveragePool": 4, "Concat": 3, "MaxPool": 1, "Reshape": 1,
        "FC": 1, "Softmax": 1,
    },
    "squeezenet": {"FusedConv": 26, "Concat": 8, "MaxPool": 3, "AveragePool": 1, "Softmax": 1},
    "zoo:lenet": {"Conv": 2, "MaxPool": 2, "FusedFC": 1, "FC": 1, "Softmax": 1},
    "zoo:mobilenet_v2": {"FusedConv": 45, "Conv": 7, "AveragePool": 1, "FC": 1, "Softmax": 1},
    "zoo:nasnet_a": {
        "Conv": 219, "FusedConv": 137, "Relu": 36, "AveragePool": 33, "FusedElementwise": 28, "Concat": 20, "Slice": 4,
        "MaxPool": 4, "FC": 1, "Softmax": 1,
    },
    "zoo:resnet50": {"FusedConv": 49, "Conv": 4, "AveragePool": 1, "MaxPool": 1, "FC": 1, "Softmax": 1},
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A model before and after all passes."""

    name: str
    model: Model
    report: PassReport

    @property
    def result(self) -> Model:
        return self.report.model


def _quick_values(seed: str, shape: tuple[int, ...], role: str) -> Array:
    """What `tests.models` gives, from few random numbers: large classifiers have a hundred million."""
    size = math.prod(shape)
    if size < 1 << 20 or role == "scale":
        return _values(seed, shape, role)
    pool = np.random.default_rng(len(seed)).standard_normal(1_000_003, dtype=np.float32)
    return np.resize(pool * np.float32(math.sqrt(2 / math.prod(shape[1:]))), shape)


_values = light._values


def _quick(model: Model) -> Model:
    """A zoo model with its large parameters filled from few random numbers."""
    if model.init_net is None:
        return model
    large, small, arrays = [], type(model.init_net)(name="init"), {}
    for definition in model.init_net.op:
        shape = next((tuple(argument.ints) for argument in definition.arg if argument.name == "shape"), ())
        (large.append((definition, shape)) if math.prod(shape) > 1 << 20 else small.op.append(definition))
    for definition, shape in large:
        arrays[definition.output[0]] = _quick_values(definition.output[0], shape, "weight")
    made = initialized(replace(model, init_net=small))
    return replace(made, parameters={**made.parameters, **arrays})


def _cases() -> list[object]:
    names = [*light.LIGHT_MODELS, *(f"zoo:{name}" for name in zoo.names())]
    return [pytest.param(name, marks=pytest.mark.slow) if name in _LARGE else name for name in names]


@pytest.fixture(scope="module", params=_cases())
def case(request: pytest.FixtureRequest) -> Case:
    name = request.param
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(light, "_values", _quick_values)
        if name.startswith("zoo:"):
            model = _quick(load_model(name))
        else:
            model = initialized(load_model(light.he_normal_light_model(name)))
    return Case(name, model, run_passes(model, GRAPH_PASSES))


@pytest.mark.slow
def test_outputs_stay_within_1e5_of_the_largest(case: Case) -> None:
    before, after, feeds = case.model, case.result, feeds_for(case.model)
    if case.name in _SMALL:  # time for float64, in which only what passes change makes a difference
        before, after = _wide(before), _wide(after)
        feeds = {name: array[..., :75, :75].astype(np.float64) for name, array in feeds.items()}
    got = outputs_of(after, feeds, other_order(after), runs=1)
    assert_close(got, outputs_of(before, feeds, runs=1))


def _wide(model: Model) -> Model:
    """The model with its parameters in float64."""
    floats = {name: array for name, array in model.parameters.items() if array.dtype == np.float32}
    return replace(model, parameters={**model.parameters, **{one: a.astype(np.float64) for one, a in floats.items()}})


def test_a_second_time_nothing_changes(case: Case) -> None:
    again = run_passes(case.result, GRAPH_PASSES).model
    assert again.net == case.result.net
    assert again.parameters.keys() == case.result.parameters.keys()


def test_what_is_left_is_what_has_to_be_computed(case: Case) -> None:
    if case.name in _LEFT:
        assert Counter(types_of(case.result)) == _LEFT[case.name]
    assert len(case.result.net.op) < len(case.model.net.op)
    assert not {"SpatialBN", "Dropout", "Gemm"} & set(types_of(case.result))


def test_residual_networks_add_in_place(case: Case) -> None:
    if case.name in ("resnet50", "zoo:resnet50"):
        added = [text for one in case.result.net.op for argument in one.arg for text in argument.strings]
        assert sum(text.startswith(b"sum:") for text in added) == 7  # large ones: behind others Relu may ask for both
        assert sum(text.startswith(b"add:") for text in added) == 9
