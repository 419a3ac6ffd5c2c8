"""What compile() chooses without measuring: by rules, the same in every process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from dagexec.compilation import CompileOptions, compile_model
from dagexec.core.model import Model
from dagexec.core.processor import instruction_set
from dagexec.ops.onednn.binding import library
from dagexec.tuning import layouts
from dagexec.tuning.bench import random_inputs
from tests.command_line import Cli
from tests.passes.models import model_of, normal, op

needs_onednn = pytest.mark.skipif(library() is None, reason="oneDNN is not installed")

AVX2, AVX512 = instruction_set(0x7), instruction_set(0x27)


def convolution(kernel: int = 3, size: int | None = 16, **arguments: int) -> Model:
    """One convolution of 32 to 32 channels on images of `size` x `size`."""
    x, w = (1, 32, size, size), normal(32, 32 // arguments.get("group", 1), kernel, kernel)
    return model_of([op("Conv", ["x", "w"], ["y"], kernel=kernel, **arguments)], inputs={"x": x}, w=w)


@pytest.fixture
def rule(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """The layout of a model on a processor of an instruction set."""
    found = library()
    assert found is not None

    def layout(model: Model, isa: object) -> str:
        monkeypatch.setattr(layouts, "library", lambda: replace(found, isa=isa))
        return layouts.estimated_layout(model, random_inputs(model, {}))

    return layout


@needs_onednn
def test_winograd_s_convolutions_want_blocks_where_vectors_have_16_lanes(rule: Callable[..., str]) -> None:
    assert rule(convolution(), AVX512) == "NCHW16c"
    assert rule(convolution(), instruction_set(0x1)) == "NHWC"


@needs_onednn
@pytest.mark.parametrize("arguments", [{"stride": 2}, {"kernel": 5}, {"group": 4}, {"group": 32}])
def test_others_want_nhwc(rule: Callable[..., str], arguments: dict[str, int]) -> None:
    assert rule(convolution(**arguments), AVX512) == "NHWC"


@needs_onednn
@pytest.mark.parametrize(("grouped_stride", "expected"), [(4, "NCHW16c"), (1, "NHWC")])
def test_the_convolutions_with_the_most_work_decide(
    rule: Callable[..., str], grouped_stride: int, expected: str
) -> None:
    operators = [
        op("Conv", ["x", "w"], ["a"], kernel=3, pad=1),
        op("Conv", ["a", "g"], ["y"], kernel=5, group=2, stride=grouped_stride),
    ]
    model = model_of(operators, inputs={"x": (1, 32, 32, 32)}, w=normal(32, 32, 3, 3), g=normal(32, 16, 5, 5))
    assert rule(model, AVX512) == expected


@needs_onednn
def test_a_net_whose_shapes_do_not_fit_together_gets_nhwc(rule: Callable[..., str]) -> None:
    assert rule(convolution(size=2), AVX512) == "NHWC"


def test_by_default_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DAGEXEC_TUNING_SECONDS")
    monkeypatch.setattr("dagexec.compilation.Bench", None)
    report = compile_model(convolution(), CompileOptions()).report
    assert report is not None
    assert report.origin == "estimated"


@pytest.mark.parametrize("name", ["lenet", "squeezenet"])
def test_two_fresh_processes_give_the_same_bytes(name: str, tmp_path: Path) -> None:
    program = f"""
import hashlib, numpy, dagexec
with dagexec.compile("zoo:{name}") as executor:
    shape = executor.inputs["data"].shape
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


@needs_onednn
def test_tune_measures_and_keeps_what_a_later_compilation_uses(cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "choices.json"
    status, out, _ = cli("tune", "zoo:lenet", "--seconds", "3", "--choices", file)
    assert status == 0, out
    assert "ms a run before" in out
    assert f"kept in {file}" in out.replace("\n", "")
    status, out, _ = cli("compare", "zoo:lenet", "--repeat", "2", "--choices", file)
    assert status == 0
    assert "layout and kernels: by rules" in out  # of one thread: a choice of its own
    assert json.loads(file.read_text())["choices"]


def test_compare_says_what_it_used(cli: Cli) -> None:
    for arguments, said in (
        ((), "layout and kernels: by rules"),
        (("--no-optimize",), "layout and kernels: the net as it is given"),
        (("--tuning-seconds", "3"), "layout and kernels: measured now"),
    ):
        status, out, _ = cli("compare", "zoo:lenet", "--repeat", "2", *arguments)
        assert status == 0
        assert said in out
