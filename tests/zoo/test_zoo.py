"""The zoo: published sizes, finite and unsaturated results, reproducible weights."""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import pytest

import dagexec
from dagexec import zoo
from dagexec.core.dtypes import FLOAT32
from dagexec.core.model import Model
from dagexec.core.node import arguments_of
from dagexec.core.row_axes import find_row_axes
from dagexec.core.schema import TensorType
from dagexec.core.traits import Rows
from dagexec.errors import ModelFormatError

PUBLISHED = {  # trained parameters; batch normalization's statistics are not among them
    "densenet121": 7_978_856,
    "googlenet": 6_998_552,
    "inception_v3": 23_834_568,
    "lenet": 431_080,
    "lenet_digits": 114_760,
    "mobilenet_v2": 3_504_872,
    "nasnet_a": 5_289_978,
    "resnet20": 269_722,
    "resnet50": 25_557_032,
    "squeezenet": 1_235_496,
    "squeezenet_towers": 4 * 1_235_496,
    "vgg19": 143_667_240,
}


@cache
def built(name: str) -> Model:
    return zoo.build(name)


def image_for(model: Model, seed: int = 0) -> np.ndarray:
    shape = model.inputs["data"].shape
    assert shape is not None
    return np.random.default_rng(seed).standard_normal([size or 1 for size in shape]).astype(np.float32)


def test_every_model_of_the_zoo_is_tested() -> None:
    assert zoo.names() == sorted(PUBLISHED)


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameter_count_is_the_published_one(name: str) -> None:
    init_net = built(name).init_net
    assert init_net is not None
    shapes = {
        operator.output[0]: arguments_of(operator, "").ints("shape")
        for operator in init_net.op
        if not operator.output[0].endswith(("_rm", "_riv"))
    }
    assert sum(math.prod(shape) for shape in shapes.values()) == PUBLISHED[name]


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED)
def test_result_is_finite_a_distribution_and_neither_flat_nor_one_hot(name: str) -> None:
    model = built(name)
    classes = 10 if name in ("lenet", "lenet_digits", "resnet20") else 1000
    with dagexec.compile(model) as executor:
        found = executor.run({"data": image_for(model)})["softmax"]
        other = executor.run({"data": image_for(model, seed=1)})["softmax"]
    assert found.shape == (1, classes)
    assert np.isfinite(found).all()
    np.testing.assert_allclose(found.sum(), 1, rtol=1e-4)
    assert 1.5 / classes < found.max() < 0.9
    assert np.abs(found - other).max() > 0.01 / classes, "the result does not depend on the input"


@pytest.mark.parametrize("name", PUBLISHED)
def test_any_number_of_images_keeps_them_apart(name: str) -> None:
    model = built(name)
    rows = find_row_axes(model, {"data": TensorType(image_for(model).shape, FLOAT32)})
    assert (rows.inputs, rows.outputs) == ({"data": Rows(0)}, {"softmax": Rows(0)})


def test_without_a_batch_size_each_run_has_its_own() -> None:
    model = zoo.build("lenet")
    image = image_for(model)
    with dagexec.compile(model) as executor:
        sizes = [executor.run({"data": np.repeat(image, size, 0)})["softmax"].shape for size in (3, 1)]
    assert sizes == [(3, 10), (1, 10)]


def test_batch_size_is_that_of_input_and_output() -> None:
    model = zoo.build("lenet", batch_size=3)
    with dagexec.compile(model) as executor:
        assert executor.run({"data": image_for(model)})["softmax"].shape == (3, 10)


def test_the_same_seed_gives_the_same_result_and_another_seed_another() -> None:
    results = []
    for seed in (5, 5, 6):
        model = zoo.build("lenet", seed=seed)
        with dagexec.compile(model) as executor:
            results.append(executor.run({"data": image_for(model)})["softmax"])
    assert results[0].tobytes() == results[1].tobytes()
    assert not np.allclose(results[0], results[2])


def test_towers_do_not_wait_for_one_another() -> None:
    model = built("squeezenet_towers")
    reached = {"data": {""}}
    for operator in model.net.op:
        if operator.type == "Mean":
            break
        own = operator.output[0].split("/")[0]
        towers = {blob.split("/")[0] for blob in operator.input if "/" in blob}
        assert towers <= {own}
        reached[operator.output[0]] = towers
    assert {name.split("/")[0] for name in reached} >= {f"tower{number}" for number in range(4)}


def test_unknown_names_and_batch_sizes_are_refused() -> None:
    with pytest.raises(ModelFormatError, match="no zoo model 'resnet5'; did you mean resnet50"):
        zoo.build("resnet5")
    with pytest.raises(ModelFormatError, match="known: densenet121, googlenet"):
        zoo.build("zzz")
    with pytest.raises(ModelFormatError, match="at least 1, found 0"):
        zoo.build("lenet", batch_size=0)
