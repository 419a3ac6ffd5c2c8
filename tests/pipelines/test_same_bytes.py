"""A pipeline gives the bytes of its models called one after another, whatever else is in it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dagexec
from dagexec.core.dtypes import FLOAT32
from dagexec.testing import random_feeds
from tests.compiler.islands.nets import attention
from tests.pipelines.layers import dense

Array = npt.NDArray[Any]

ONE_THREAD: Mapping[str, Any] = {"intra_op_threads": 1}


def beside_each_other(models: Mapping[str, dagexec.Model]) -> dagexec.Pipeline:
    """Each model on inputs of its own, which are called as it and what they are to it."""
    p = dagexec.Pipeline("many")
    for name, model in models.items():
        stage = p.stage(name, model, {one: p.input(f"{name}:{one}") for one in sorted(model.needed_inputs())})
        for one in model.outputs:
            p.output(f"{name}:{one}", stage[one])
    return p


def assert_same_bytes(models: Mapping[str, dagexec.Model], feeds: Mapping[str, Mapping[str, Array]]) -> None:
    """That each model gives the same with all others in one net."""
    given_all = {f"{name}:{one}": array for name, fed in feeds.items() for one, array in fed.items()}
    with dagexec.compile(beside_each_other(models), net_type="dag", num_workers=2, **ONE_THREAD) as together:
        found = together.run(given_all)
    for name, model in models.items():
        with dagexec.compile(model, net_type="simple", **ONE_THREAD) as alone:
            expected = alone.run(feeds[name])
        for one, array in expected.items():
            assert found[f"{name}:{one}"].tobytes() == array.tobytes(), (name, one)


@pytest.mark.slow
def test_models_of_many_kinds_keep_their_bytes_in_one_net() -> None:
    models = {name: dagexec.load_model(f"zoo:{name}") for name in ("lenet", "resnet20", "squeezenet")}
    feeds = {name: random_feeds(model) for name, model in models.items()}
    models["attention"] = dagexec.load_model(attention())
    feeds["attention"] = {"x": np.random.default_rng(3).standard_normal((2, 5, 32)).astype(np.float32)}
    assert_same_bytes(models, feeds)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet50", "mobilenet_v2", "googlenet", "densenet121"])
def test_large_models_keep_their_bytes_beside_another(name: str) -> None:
    models = {one: dagexec.load_model(f"zoo:{name}") for one in ("one", "two")}
    assert_same_bytes(models, {one: random_feeds(model, seed=seed) for seed, (one, model) in enumerate(models.items())})


def normalized(channels: int) -> dagexec.Model:
    """y = x scale + shift with the same two numbers for each channel, as batch normalization at inference."""
    random = np.random.default_rng(2)
    parameters = {
        one: random.uniform(0.5, 1.5, channels).astype(np.float32) for one in ("scale", "shift", "mean", "var")
    }
    operator = dagexec.op("SpatialBN", ["x", "scale", "shift", "mean", "var"], "y", is_test=1)
    info = {"x": dagexec.InputInfo(FLOAT32, (None, channels, None, None))}
    return dagexec.Model(
        "bn", dagexec.NetDef(name="bn", op=[operator]), parameters=parameters, inputs=info, outputs=("y",)
    )


def convolution(channels: int) -> dagexec.Model:
    weights = np.random.default_rng(1).standard_normal((channels, channels, 3, 3)).astype(np.float32)
    operator = dagexec.op("Conv", ["x", "w"], "y", kernel=3, pad=1)
    info = {"x": dagexec.InputInfo(FLOAT32, (None, channels, None, None))}
    return dagexec.Model(
        "conv", dagexec.NetDef(name="conv", op=[operator]), parameters={"w": weights}, inputs=info, outputs=("y",)
    )


@pytest.mark.parametrize("device", ["cpu", "sim:0"])
def test_nothing_of_one_stage_is_folded_into_another(device: str) -> None:
    first, second = convolution(16), normalized(16)
    p = dagexec.Pipeline("p")
    p.output("y", p.stage("second", second, x=p.stage("first", first, p.input("x"))))
    x = np.random.default_rng(0).standard_normal((1, 16, 12, 12)).astype(np.float32)
    with (
        dagexec.compile(p, device=device) as together,
        dagexec.compile(first, device=device) as one,
        dagexec.compile(second, device=device) as two,
    ):
        expected = two.run({"x": one.run({"x": x})["y"]})["y"]
        assert together.run({"x": x})["y"].tobytes() == expected.tobytes()


def test_outputs_that_are_dropped_change_nothing() -> None:
    """With the product as an output, the activation is an operator of its own."""
    layer = dense("layer", 8, 16)
    both = dagexec.Model("both", layer.net, parameters=layer.parameters, inputs=layer.inputs, outputs=("h", "y"))
    p = dagexec.Pipeline("p")
    p.output("out", p.stage("layer", both, p.input("x"), drop=["h"])["y"])
    x = np.random.default_rng(0).standard_normal((3, 8)).astype(np.float32)
    with dagexec.compile(p) as together, dagexec.compile(both) as alone:
        assert together.run({"x": x})["out"].tobytes() == alone.run({"x": x})["y"].tobytes()
        assert "layer/h" not in together.model.outputs


def test_blobs_of_two_stages_that_passes_would_call_the_same_stay_apart() -> None:
    """Both reorder the pipeline's input for their convolutions."""
    p = dagexec.Pipeline("p")
    x = p.input("x", "float32", (1, 16, 12, 12))
    for name in ("left", "right"):
        stage = p.stage(name, convolution(16), x)
        p.output(name, p.stage(f"{name} again", convolution(16), stage))
    image = np.random.default_rng(0).standard_normal((1, 16, 12, 12)).astype(np.float32)
    with dagexec.compile(p) as together, dagexec.compile(convolution(16)) as alone:
        expected = alone.run({"x": alone.run({"x": image})["y"]})["y"]
        found = together.run({"x": image})
        written = [one for definition in together.model.net.op for one in definition.output]
    assert found["left"].tobytes() == found["right"].tobytes() == expected.tobytes()
    assert len(set(written)) == len(written)


WIDTH = 8


def half(x: Array) -> Array:
    return x / np.float32(2)


def total(*arrays: Array) -> Array:
    return np.sum(arrays, axis=0, dtype=np.float32)


@st.composite
def wirings(draw: st.DrawFn) -> list[tuple[str, list[int]]]:
    """Stages, each with what it is and the numbers of what it reads: 0 is the input, n stage n."""
    found: list[tuple[str, list[int]]] = []
    for number in range(draw(st.integers(1, 7))):
        kind = draw(st.sampled_from(["dense", "half", "total"]))
        count = draw(st.integers(2, 3)) if kind == "total" else 1
        found.append((kind, draw(st.lists(st.integers(0, number), min_size=count, max_size=count))))
    return found


@pytest.mark.slow
@settings(deadline=None)
@given(wirings(), st.integers(1, 4), st.sampled_from(["dag", "async_dag"]), st.sampled_from(["cpu", "sim:0"]))
def test_any_pipeline_gives_the_bytes_of_its_stages_one_after_another(
    wiring: list[tuple[str, list[int]]], rows: int, net_type: Any, device: str
) -> None:
    layers = [dense(f"layer{number}", WIDTH, WIDTH, number) for number in range(len(wiring))]
    x = np.random.default_rng(5).standard_normal((rows, WIDTH)).astype(np.float32)
    p = dagexec.Pipeline("any")
    values: list[Any] = [p.input("x", "float32", (None, WIDTH))]
    arrays = [x]
    for number, (kind, read) in enumerate(wiring):
        name, given_values = f"stage{number}", [values[one] for one in read]
        if kind == "dense":
            values.append(p.stage(name, layers[number], given_values[0]))
            with dagexec.compile(layers[number], net_type="simple", device=device, **ONE_THREAD) as executor:
                arrays.append(executor.run({"x": arrays[read[0]]})["y"])
        else:
            function = half if kind == "half" else total
            values.append(p.python(name, function, given_values, f"float32[?, {WIDTH}]"))
            arrays.append(function(*(arrays[one] for one in read)))
    for number, value in enumerate(values[1:]):
        p.output(f"y{number}", value)
    if not any(0 in read for _, read in wiring):
        p.output("x", values[0])
    with dagexec.compile(p, net_type=net_type, num_workers=2, device=device, **ONE_THREAD) as executor:
        found = executor.run({"x": x})
    for number, array in enumerate(arrays[1:]):
        assert found[f"y{number}"].tobytes() == array.tobytes(), number
