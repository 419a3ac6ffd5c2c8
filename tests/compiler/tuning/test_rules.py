"""What compile() chooses without measuring: by rules, the same in every process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dagexec.compiler.compilation import compile_model
from dagexec.compiler.tuning import layouts
from dagexec.compiler.tuning.bench import random_inputs
from dagexec.core.model import Model
from dagexec.ops.engines.onednn.binding import library
from dagexec.options import CompileOptions
from tests.command_line import Cli
from tests.compiler.passes.models import model_of, normal, op

needs_onednn = pytest.mark.skipif(library() is None, reason="oneDNN is not installed")


def convolution(kernel: int = 3, size: int | None = 16, **arguments: int) -> Model:
    """One convolution of 64 to 64 channels on images of `size` x `size`."""
    x, w = (1, 64, size, size), normal(64, 64 // arguments.get("group", 1), kernel, kernel)
    return model_of([op("Conv", ["x", "w"], ["y"], kernel=kernel, **arguments)], inputs={"x": x}, w=w)


@pytest.fixture
def rule(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """The layout of a model where the library has kernels for an order of blocks, or for none."""

    def layout(model: Model, blocks: str | None, own_kernels: bool = True) -> str:
        monkeypatch.setattr(layouts, "widest_blocks", lambda: blocks)
        monkeypatch.setattr(layouts, "library", object)  # where there is none, too
        monkeypatch.setattr(layouts, "is_available", lambda _library: own_kernels)
        return layouts.estimated_layout(model, random_inputs(model, {}))

    return layout


def test_3x3_convolutions_want_the_layout_that_has_winograd_s_algorithm(rule: Callable[..., str]) -> None:
    assert rule(convolution(), "NCHW16c", own_kernels=False) == "NCHW16c"
    for blocks in ("NCHW16c", "NCHW8c", None):
        assert rule(convolution(), blocks) == "NHWC"


@pytest.mark.parametrize("blocks", ["NCHW16c", "NCHW8c"])
def test_one_tap_wants_blocks(rule: Callable[..., str], blocks: str) -> None:
    assert rule(convolution(kernel=1), blocks) == blocks


def test_depthwise_ones_want_blocks_where_no_kernels_of_our_own_run(rule: Callable[..., str]) -> None:
    assert rule(convolution(group=64), "NCHW8c", own_kernels=False) == "NCHW8c"
    assert rule(convolution(group=64), "NCHW8c") == "NHWC"


@pytest.mark.parametrize("arguments", [{"stride": 2}, {"kernel": 5}, {"group": 4}, {"group": 64}])
def test_others_want_nhwc(rule: Callable[..., str], arguments: dict[str, int]) -> None:
    assert rule(convolution(**arguments), "NCHW16c") == "NHWC"


@pytest.mark.parametrize(("grouped_stride", "expected"), [(16, "NCHW16c"), (1, "NHWC")])
def test_the_convolutions_with_the_most_work_decide(
    rule: Callable[..., str], grouped_stride: int, expected: str
) -> None:
    operators = [
        op("Conv", ["x", "w"], ["a"], kernel=1),
        op("Conv", ["a", "g"], ["y"], kernel=3, group=2, stride=grouped_stride),
    ]
    model = model_of(operators, inputs={"x": (1, 64, 32, 32)}, w=normal(64, 64, 1, 1), g=normal(64, 32, 3, 3))
    assert rule(model, "NCHW16c") == expected


def test_a_net_whose_shapes_do_not_fit_together_gets_nhwc(rule: Callable[..., str]) -> None:
    assert rule(convolution(size=2), "NCHW16c") == "NHWC"


def test_by_default_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DAGEXEC_TUNING_SECONDS")
    monkeypatch.setattr("dagexec.compiler.compilation.Bench", None)
    report = compile_model(convolution(), CompileOptions()).report
    assert report is not None
    assert report.origin == "estimated"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lenet", "squeezenet"])
def test_two_fresh_processes_give_the_same_bytes(name: str, tmp_path: Path) -> None:
    program = f"""
import hashlib, numpy, dagexec
with dagexec.compile("zoo:{name}") as executor:
    shape = [size or 1 for size in executor.inputs["data"].shape]
    outputs = executor.run({{"data": numpy.random.default_rng(1).standard_normal(shape, numpy.float32)}})
print(hashlib.sha256(outputs["softmax"].tobytes()).hexdigest())
"""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("DAGEXEC_TUNING")}
    digests = set()
    for folder in ("one", "other"):
        environment["DAGEXEC_CHOICES"] = str(tmp_path / folder / "choices.json")
        found = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
        )
        digests.add(found.stdout)
    assert len(digests) == 1
    assert not list(tmp_path.iterdir())  # nothing was measured, so that nothing is kept


@pytest.mark.slow
@needs_onednn
def test_tune_measures_and_keeps_what_a_later_compilation_uses(cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "choices.json"
    status, out, _ = cli("tune", "zoo:lenet", "--seconds", "3", "--choices", file)
    assert status == 0, out
    assert "ms per run before" in out
    assert f"saved in {file}" in out.replace("\n", "")
    status, out, _ = cli("compare", "zoo:lenet", "--repeat", "2", "--choices", file)
    assert status == 0
    assert "layout and kernels: measured earlier" in out
    assert json.loads(file.read_text())["choices"]


@pytest.mark.slow
def test_compare_says_what_it_used(cli: Cli) -> None:
    for arguments, said in (
        ((), "layout and kernels: by rules"),
        (("--no-optimize",), "layout and kernels: the net as it is given"),
        (("--tuning-seconds", "3"), "layout and kernels: measured now"),
    ):
        status, out, _ = cli("compare", "zoo:lenet", "--repeat", "2", *arguments)
        assert status == 0
        assert said in out
