"""The model builder: names, arguments, reproducible parameters, and models that run."""

from __future__ import annotations

import numpy as np
import pytest

import dagexec
from dagexec import Workspace
from dagexec.building.fillers import CAFFE2, constant, gaussian
from dagexec.building.model_builder import ModelBuilder
from dagexec.core.model import Model
from dagexec.errors import SchemaError


def parameters(model: Model) -> dict[str, np.ndarray]:
    """What the init net fills."""
    workspace = Workspace()
    assert model.init_net is not None
    workspace.run_net_once(model.init_net)
    return {name: workspace.fetch_blob(name) for name in model.init_net.external_output}


def two_layers(seed: int = 0, *, first: str = "a", second: str = "b") -> Model:
    builder = ModelBuilder("two", seed=seed)
    x = builder.add_input("data", (1, 3, 8, 8))
    outputs = [builder.conv(x, name, 3, 4, kernel=3) for name in (first, second)]
    return builder.model(outputs)


def test_parameters_have_the_names_and_shapes_brew_gives() -> None:
    builder = ModelBuilder("names")
    x = builder.add_input("data", (1, 4, 8, 8))
    x = builder.conv(x, "conv", 4, 6, kernel=(3, 5), group=2)
    x = builder.spatial_bn(x, "bn", 6)
    x = builder.fc(x, "pred", 6 * 6 * 4, 10)
    assert builder.parameters == {
        "conv_w": (6, 2, 3, 5), "conv_b": (6,), "bn_s": (6,), "bn_b": (6,), "pred_w": (10, 144), "pred_b": (10,),
    }  # fmt: skip
    assert builder.computed_parameters == {"bn_rm": (6,), "bn_riv": (6,)}
    shapes = {name: value.shape for name, value in parameters(builder.model([x])).items()}
    assert shapes == {**builder.parameters, **builder.computed_parameters}


def test_parameters_depend_on_the_seed_and_their_name_and_not_on_the_order() -> None:
    one, same = parameters(two_layers(seed=1)), parameters(two_layers(seed=1))
    swapped = parameters(two_layers(seed=1, first="b", second="a"))
    other = parameters(two_layers(seed=2))
    for name in ("a_w", "b_w", "a_b", "b_b"):
        assert one[name].tobytes() == same[name].tobytes() == swapped[name].tobytes()
        assert not np.array_equal(one[name], other[name])
    assert not np.array_equal(one["a_w"], one["b_w"])


def test_weights_have_the_spread_of_he_over_the_fan_in() -> None:
    builder = ModelBuilder("he")
    x = builder.add_input("data", (1, 64, 8, 8))
    model = builder.model([builder.conv(x, "c", 64, 256, kernel=3), builder.conv(x, "g", 64, 512, kernel=5, group=64)])
    filled = parameters(model)
    np.testing.assert_allclose(filled["c_w"].std(), np.sqrt(2 / (64 * 9)), rtol=0.02)
    np.testing.assert_allclose(filled["g_w"].std(), np.sqrt(2 / 25), rtol=0.02)


def test_batch_normalization_starts_away_from_the_identity_unless_asked_for_caffe2s_values() -> None:
    for initialization in (None, CAFFE2):
        chosen = {} if initialization is None else {"initialization": initialization}
        builder = ModelBuilder("bn", **chosen)  # type: ignore[arg-type]
        x = builder.add_input("data", (1, 500, 2, 2))
        filled = parameters(builder.model([builder.spatial_bn(x, "bn", 500)]))
        if initialization is CAFFE2:
            for suffix, value in (("s", 1), ("b", 0), ("rm", 0), ("riv", 1)):
                np.testing.assert_array_equal(filled[f"bn_{suffix}"], value)
        else:
            for suffix in ("s", "riv"):
                assert 0.5 <= filled[f"bn_{suffix}"].min() < 0.55
                assert 1.45 < filled[f"bn_{suffix}"].max() <= 1.5
            np.testing.assert_allclose(filled["bn_rm"].std(), 0.1, rtol=0.15)


def test_every_layer_runs_and_has_the_shape_it_should() -> None:
    builder = ModelBuilder("all", seed=3)
    data = builder.add_input("data", (2, 3, 9, 9))
    conv = builder.conv(data, "conv", 3, 4, kernel=3, stride=2, pad=1)
    bn = builder.spatial_bn(conv, "bn", 4)
    relu = builder.relu(bn, bn)
    lrn = builder.lrn(relu, "lrn", size=3)
    big = builder.max_pool(lrn, "max", kernel=2, stride=2)
    ceil = builder.max_pool(lrn, "ceil", kernel=2, stride=2, ceil_mode=True)
    mean = builder.average_pool(lrn, "mean", kernel=3, pad=1)
    joined = builder.concat([lrn, mean], "joined")
    total = builder.sum([lrn, mean], "total")
    low = builder.clip(builder.dropout(total, "drop"), "low", 0.0, 0.1)
    flat = builder.flatten(builder.global_average_pool(joined, "gap"), "flat")
    softmax = builder.softmax(builder.fc(flat, "pred", 8, 5), "softmax")
    wide = builder.conv(data, "wide", 3, 2, kernel=(1, 3), pad=(0, 1), dilation=1, bias=False)
    blobs = [conv, big, ceil, joined, total, low, softmax, wide]
    image = np.random.default_rng(0).standard_normal((2, 3, 9, 9)).astype(np.float32)
    with dagexec.compile(builder.model(blobs)) as executor:
        found = executor.run({"data": image})
    assert [found[blob].shape for blob in blobs] == [
        (2, 4, 5, 5), (2, 4, 2, 2), (2, 4, 3, 3), (2, 8, 5, 5), (2, 4, 5, 5), (2, 4, 5, 5), (2, 5), (2, 2, 9, 9),
    ]  # fmt: skip
    np.testing.assert_allclose(found[softmax].sum(axis=1), 1, rtol=1e-6)
    assert found[low].min() >= 0
    assert found[low].max() <= np.float32(0.1)


def test_order_nhwc_puts_channels_last_in_data_and_filter() -> None:
    image = np.random.default_rng(0).standard_normal((1, 6, 5, 3)).astype(np.float32)
    results = []
    for order, shown in (("NHWC", image), ("NCHW", image.transpose(0, 3, 1, 2))):
        builder = ModelBuilder("order", order=order)
        x = builder.add_input("data", shown.shape)
        ones = {"weight_init": constant(0.5), "bias_init": constant(1)}
        model = builder.model([builder.conv(x, "conv", 3, 2, kernel=3, **ones)])
        with dagexec.compile(model) as executor:
            results.append(executor.run({"data": np.ascontiguousarray(shown)})["conv"])
    np.testing.assert_allclose(results[0], results[1].transpose(0, 2, 3, 1), rtol=1e-5)


def test_training_mode_names_the_outputs_training_needs() -> None:
    builder = ModelBuilder("train")
    x = builder.add_input("data", (2, 3, 4, 4))
    builder.dropout(builder.spatial_bn(x, "bn", 3, is_test=False), "drop", is_test=False)
    assert list(builder.net.op[0].output) == ["bn", "bn_rm", "bn_riv", "bn_sm", "bn_siv"]
    assert list(builder.net.op[1].output) == ["drop", "_drop_mask"]


def test_a_model_does_not_change_with_its_builder() -> None:
    builder = ModelBuilder("snapshot")
    x = builder.add_input("data", (1, 2))
    model = builder.model([builder.relu(x, "y")])
    builder.relu("y", "z")
    assert [operator.output[0] for operator in model.net.op] == ["y"]
    assert list(model.net.external_output) == ["y"]


def test_mistakes_are_refused_with_the_name_of_the_blob() -> None:
    builder = ModelBuilder("wrong")
    x = builder.add_input("data", (1, 3, 8, 8))
    builder.conv(x, "conv", 3, 4, kernel=1)
    with pytest.raises(SchemaError, match="'conv_w' already exists"):
        builder.conv(x, "conv", 3, 4, kernel=1)
    with pytest.raises(SchemaError, match="'data' already exists"):
        builder.add_parameter("data", [1], gaussian(1))
    with pytest.raises(SchemaError, match="conv 'bad': 2 groups do not divide 3 and 4"):
        builder.conv(x, "bad", 3, 4, kernel=1, group=2)
    with pytest.raises(SchemaError, match=r"no operator writes \['nothing'\]"):
        builder.model(["nothing"])
    with pytest.raises(SchemaError, match="NCHW or NHWC, found 'HWCN'"):
        ModelBuilder("order", order="HWCN")


def test_a_name_is_either_an_output_or_declared() -> None:
    builder = ModelBuilder("m")
    x = builder.add_input("x", (4, 3))
    builder.relu(x, "fc_w")
    with pytest.raises(SchemaError, match="blob 'fc_w' already exists"):
        builder.fc(x, "fc", 3, 2)
    with pytest.raises(SchemaError, match="blob 'fc_w' already exists"):
        builder.add_input("fc_w", (1,))


def test_an_operator_may_only_overwrite_a_parameter_that_it_reads() -> None:
    builder = ModelBuilder("m")
    x = builder.add_input("x", (4, 3))
    builder.fc(x, "fc", 3, 2)
    with pytest.raises(SchemaError, match="Relu would overwrite 'fc_w', which is a parameter"):
        builder.relu(x, "fc_w")
    assert builder.clip("fc_w", "fc_w", -1, 1) == "fc_w"
    assert builder.relu(x, x) == x
