"""Scripts in the form of Caffe2's tutorials, as `python -m dagexec.caffe2` runs them, against NumPy in float64."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image

from dagexec.caffe2 import uninstall
from dagexec.caffe2.__main__ import main
from dagexec.caffe2.net import Net

SCRIPTS = Path(__file__).parent / "scripts"
Array = npt.NDArray[Any]
Script = Callable[..., dict[str, Any]]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[Script]:
    """Runs a script as the command does, as the first in its process, and gives its variables."""
    variables: dict[str, Any] = {}
    run_path = runpy.run_path

    def remembering(path: str, run_name: str) -> None:
        variables.update(run_path(path, run_name=run_name))

    def run(*arguments: str) -> dict[str, Any]:
        monkeypatch.setattr("sys.argv", [])
        monkeypatch.setattr("sys.path", ["", *sys.path])
        monkeypatch.setattr(runpy, "run_path", remembering)
        monkeypatch.setattr(Net, "_names", set())
        main([str(SCRIPTS / argument) if argument.endswith(".py") else argument for argument in arguments])
        return variables

    yield run
    uninstall()


@pytest.mark.slow
def test_toy_regression(script: Script) -> None:
    for step, (w, b, x, y, new_w, new_b) in enumerate(script("toy_regression.py")["history"], 1):
        error = (x.astype(float) @ w.T + b) - y
        rate = 0.1 * 0.9 ** (step // 20)
        np.testing.assert_allclose(new_w, w - rate * (error * x).mean(0), rtol=0, atol=2e-6)
        np.testing.assert_allclose(new_b, b - rate * error.mean(0), rtol=0, atol=2e-6)


def test_basics(script: Script) -> None:
    found = script("basics.py")
    assert "invincible_pink_unicorn" in str(found["missing"])
    data, label, w, b = (found[name] for name in ("data", "label", "w", "b"))
    pred = 1 / (1 + np.exp(-(data.astype(float) @ w.T + b)))
    softmax = _softmax(pred)
    np.testing.assert_allclose(found["result"], softmax, rtol=1e-5)
    np.testing.assert_allclose(found["loss_value"], -np.log(softmax[np.arange(16), label]).mean(), rtol=1e-5)
    gradient = (softmax - np.eye(10)[label]) / 16 * pred * (1 - pred)
    np.testing.assert_allclose(found["w_gradient"], gradient.T @ data, rtol=1e-4, atol=1e-7)


def test_intro(script: Script) -> None:
    found = script("intro.py")
    assert 'type: "SoftmaxWithLoss"' in found["text"][0]
    assert 'type: "XavierFill"' in found["text"][1]
    data, label, w = found["data"], found["label"], found["w"].astype(float)
    pred = 1 / (1 + np.exp(-(data @ w.T)))
    softmax = _softmax(pred)
    np.testing.assert_allclose(found["result"], softmax, rtol=1e-5)
    gradient = (softmax - np.eye(10)[label]) / 16 * pred * (1 - pred)
    np.testing.assert_allclose(found["gradient"], gradient.T @ data, rtol=1e-4, atol=1e-7)


@pytest.mark.slow
def test_small_images(script: Script, tmp_path: Path) -> None:
    found = script("small_images.py", str(tmp_path))
    with Image.open(tmp_path / "05.png") as picture:
        square = np.asarray(picture)[1:11]
    with Image.fromarray(square) as cropped:
        pixels = np.asarray(cropped.resize((8, 8), Image.Resampling.BILINEAR)).astype(float)
    np.testing.assert_array_equal(found["images"][5], pixels.transpose(2, 0, 1)[::-1] - 100)
    params = {name: value.astype(float) for name, value in found["params"].items()}
    windows = np.lib.stride_tricks.sliding_window_view(found["images"] / 128.0, (3, 3), (2, 3))
    conv = np.einsum("ncijkl,ockl->noij", windows, params["conv1_w"]) + params["conv1_b"][:, None, None]
    pool = conv.reshape(24, 4, 3, 2, 3, 2).max((3, 5))
    softmax = _softmax(np.maximum(pool, 0).reshape(24, -1) @ params["fc1_w"].T + params["fc1_b"])
    np.testing.assert_allclose(found["results"], softmax, rtol=1e-4, atol=1e-6)
    assert (softmax.argmax(1) == found["labels"]).all()
    assert found["losses"][-1] < 0.1 * found["losses"][0]
    assert found["accuracies"][-1] == 1


@pytest.mark.slow
def test_digits(script: Script, tmp_path: Path) -> None:
    found = script("digits.py", str(tmp_path / "digits.minidb"))
    params = {name: value.astype(float) for name, value in found["start"].items()}
    images, labels = found["images"] / 256, found["labels"]
    expected = [_step(params, images, labels, 0.1 * 0.999**step) for step in range(1, 31)]
    np.testing.assert_allclose(found["losses"], [loss for loss, _ in expected], rtol=1e-4)
    assert found["accuracies"] == pytest.approx([accuracy for _, accuracy in expected], abs=1 / 32 + 1e-6)
    assert found["losses"][-1] < 0.8 * found["losses"][0]


@pytest.mark.slow
def test_a_pretrained_network_gives_what_caffe2_recorded(script: Script) -> None:
    folder = SCRIPTS.parents[1] / "fixtures" / "caffe2" / "squeezenet"
    results = script("pretrained.py", str(folder))["results"]
    [expected] = np.load(folder / "outputs.npz").values()
    assert results.shape == (1, *expected.shape)
    np.testing.assert_allclose(results[0], expected, rtol=1e-4, atol=1e-7)


@pytest.mark.slow
def test_several_gpus(script: Script, tmp_path: Path) -> None:
    """A step is that of both devices' images: momentum 0.9, Nesterov's, and decay of weights."""
    found = script("--simulated-gpus", "2", "multi_gpu.py", str(tmp_path / "images.minidb"))
    params = {name: value.astype(float) for name, value in found["start"].items()}
    momenta = {name: np.zeros_like(value) for name, value in params.items()}
    for step in range(8):
        rows = np.arange(8 * step, 8 * step + 8) % 16
        loss, gradients = _convolution(params, found["images"][rows] / 256, found["labels"][rows])
        assert found["losses"][step] == pytest.approx(loss, rel=1e-4)
        for name, gradient in gradients.items():
            slope = gradient + (1e-4 * params[name] if name.endswith("w") else 0)
            after = 0.05 * slope + 0.9 * momenta[name]
            params[name] -= 1.9 * after - 0.9 * momenta[name]
            momenta[name] = after
    for name, arrays in found["params"].items():
        assert arrays[0].tobytes() == arrays[1].tobytes()
        np.testing.assert_allclose(arrays[0], params[name], rtol=1e-4, atol=1e-5)


def _convolution(params: dict[str, Array], images: Array, labels: Array) -> tuple[float, dict[str, Array]]:
    """The loss of the network of `multi_gpu.py` in float64, and its gradients."""
    count = len(images)
    windows = np.lib.stride_tricks.sliding_window_view(images[:, 0], (3, 3), (1, 2))
    conv = np.einsum("nijkl,okl->noij", windows, params["conv_w"][:, 0]) + params["conv_b"][:, None, None]
    flat = np.maximum(conv, 0).reshape(count, -1)
    softmax = _softmax(flat @ params["pred_w"].T + params["pred_b"])
    d_pred = (softmax - np.eye(4)[labels]) / count
    d_conv = (d_pred @ params["pred_w"]).reshape(conv.shape) * (conv > 0)
    gradients = {
        "pred_w": d_pred.T @ flat,
        "pred_b": d_pred.sum(0),
        "conv_w": np.einsum("noij,nijkl->okl", d_conv, windows)[:, None],
        "conv_b": d_conv.sum((0, 2, 3)),
    }
    return float(-np.log(softmax[np.arange(count), labels]).mean()), gradients


def test_python_operators(script: Script) -> None:
    found = script("python_operators.py")
    np.testing.assert_array_equal(found["doubled"], [6])
    np.testing.assert_array_equal(found["through_workspace"], [6])
    np.testing.assert_array_equal(found["y"], [0, 2, 4, 6])
    np.testing.assert_array_equal(found["x_grad"], [2, 4, 6, 8])
    np.testing.assert_array_equal(found["three"], [0, 3, 6, 9])
    np.testing.assert_array_equal(found["z"], [0, 2, 4, 6])


def test_control_ops(script: Script) -> None:
    found = script("control_ops.py")
    assert found["if_else"] == 1
    assert (found["summed"], found["i"]) == (28, 8)
    assert found["steps"] == {"start": 2, "counted": 4, "was_positive": 0}


def test_char_rnn(script: Script) -> None:
    found = script("char_rnn.py")
    params = [found["params"][name].astype(float) for name in found["names"]]
    hidden = cell = np.zeros((2, 8))
    for step, (x, target) in enumerate(zip(found["inputs"], found["targets"], strict=True), 1):
        loss, gradients, hidden, cell = _lstm(params, x.astype(float), target, hidden, cell)
        assert found["losses"][step - 1] == pytest.approx(loss, rel=1e-5)
        for param, gradient in zip(params, gradients, strict=True):
            param -= 0.5 * 0.9999**step * gradient
    for name, param in zip(found["names"], params, strict=True):
        np.testing.assert_allclose(found["trained"][name], param, rtol=0, atol=2e-6)
    assert np.mean(found["losses"][-4:]) < 0.97 * np.mean(found["losses"][:4])


def _lstm(
    params: list[Array], x: Array, target: Array, hidden: Array, cell: Array
) -> tuple[float, list[Array], Array, Array]:
    """The loss of the network of `char_rnn.py` in float64, its gradients, and the states behind the last step."""
    i2h_w, i2h_b, gates_w, gates_b, out_w, out_b = params
    steps = []
    for row in x:
        gates = row @ i2h_w.T + i2h_b + hidden @ gates_w.T + gates_b
        i, f, o = (1 / (1 + np.exp(-part)) for part in np.split(gates[:, :24], 3, axis=1))
        g = np.tanh(gates[:, 24:])
        after = f * cell + i * g
        steps.append((row, hidden, cell, i, f, o, g, after))
        hidden, cell = o * np.tanh(after), after
    outputs = np.array([one[5] * np.tanh(one[7]) for one in steps])
    softmax = _softmax((outputs @ out_w.T + out_b).reshape(len(target), -1))
    loss = float(-np.log(softmax[np.arange(len(target)), target]).mean())
    d_out = ((softmax - np.eye(softmax.shape[1])[target]) / len(target)).reshape(*outputs.shape[:2], -1)
    gradients = [np.zeros_like(param) for param in params]
    gradients[4] += np.einsum("tno,tnh->oh", d_out, outputs)
    gradients[5] += d_out.sum((0, 1))
    d_hidden, d_cell = np.zeros_like(hidden), np.zeros_like(cell)
    for (row, before, cell_before, i, f, o, g, after), d_row in zip(steps[::-1], (d_out @ out_w)[::-1], strict=True):
        d_hidden = d_hidden + d_row
        d_cell = d_cell + d_hidden * o * (1 - np.tanh(after) ** 2)
        parts = d_cell * g * i * (1 - i), d_cell * cell_before * f * (1 - f), d_hidden * np.tanh(after) * o * (1 - o)
        d_gates = np.concatenate([*parts, d_cell * i * (1 - g**2)], axis=1)
        gradients[0] += d_gates.T @ row
        gradients[1] += d_gates.sum(0)
        gradients[2] += d_gates.T @ before
        gradients[3] += d_gates.sum(0)
        d_hidden, d_cell = d_gates @ gates_w, d_cell * f
    return loss, gradients, hidden, cell


def _softmax(x: Array) -> Array:
    exponentials = np.exp(x - x.max(1, keepdims=True))
    return np.asarray(exponentials / exponentials.sum(1, keepdims=True))


def _step(params: dict[str, Array], images: Array, labels: Array, rate: float) -> tuple[float, float]:
    """A step of the network of `digits.py` in float64, which changes the parameters; the loss and accuracy before."""
    count = len(images)
    windows = np.lib.stride_tricks.sliding_window_view(images[:, 0], (3, 3), (1, 2))
    conv = np.einsum("nijkl,okl->noij", windows, params["conv1_w"][:, 0]) + params["conv1_b"][:, None, None]
    blocks = conv.reshape(count, 4, 5, 2, 5, 2).transpose(0, 1, 2, 4, 3, 5).reshape(count, 4, 5, 5, 4)
    pool, place = blocks.max(-1), blocks.argmax(-1)
    flat = pool.reshape(count, -1)
    hidden = np.maximum(flat @ params["fc2_w"].T + params["fc2_b"], 0)
    softmax = _softmax(hidden @ params["pred_w"].T + params["pred_b"])
    loss = float(-np.log(softmax[np.arange(count), labels]).mean())
    d_pred = (softmax - np.eye(10)[labels]) / count
    d_hidden = d_pred @ params["pred_w"] * (hidden > 0)
    d_pool = (d_hidden @ params["fc2_w"]).reshape(pool.shape)
    d_blocks = np.eye(4)[place] * d_pool[..., None]
    d_conv = d_blocks.reshape(count, 4, 5, 5, 2, 2).transpose(0, 1, 2, 4, 3, 5).reshape(conv.shape)
    gradients = {
        "pred_w": d_pred.T @ hidden,
        "pred_b": d_pred.sum(0),
        "fc2_w": d_hidden.T @ flat,
        "fc2_b": d_hidden.sum(0),
        "conv1_w": np.einsum("noij,nijkl->okl", d_conv, windows)[:, None],
        "conv1_b": d_conv.sum((0, 2, 3)),
    }
    accuracy = float((softmax.argmax(1) == labels).mean())
    for name, gradient in gradients.items():
        params[name] = params[name] - rate * gradient
    return loss, accuracy
