"""The graphs that the engine builds for real nets, shown to the real cuDNN: it validates them and finds engines.

Nothing is executed: see `tests.cuda.deviceless`. Skipped without nvidia-cudnn-frontend; DAGEXEC_CUDNN_PYTHON may name a
Python that has it. DAGEXEC_ALL_GEOMETRIES=1 asks for every geometry of every net instead of a part.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import ml_dtypes
import numpy as np
import pytest

from dagexec.binding.parameters import initialized
from dagexec.core.dtypes import from_numpy
from dagexec.core.graph import build_graph
from dagexec.core.inference import infer_net
from dagexec.core.model import Model
from dagexec.core.node import arguments_of
from dagexec.core.schema import OperatorCall, TensorType
from dagexec.devices.cuda.cudnn_graph import DATA_GRADIENT, FILTER_GRADIENT, FORWARD, ConvGraph
from dagexec.devices.cuda.cudnn_plans import PlanOptions
from dagexec.ops.base.blocks import compute_dtype
from dagexec.ops.base.geometry import Axis
from dagexec.ops.engines.cuda.cudnn.operator import CudnnConvOperator
from dagexec.ops.families.conv.convolution import conv_window
from dagexec.ops.families.conv.problem import DEFAULT_LIMIT, ConvProblem
from dagexec.zoo import build
from tests.cuda.deviceless import DEVICES, ask, interpreter

pytestmark = [
    pytest.mark.skipif(interpreter() is None, reason="nvidia-cudnn-frontend is not installed"),
    pytest.mark.skipif(shutil.which("gcc") is None, reason="there is no gcc for the libraries that stand for CUDA's"),
    pytest.mark.skipif(sys.platform != "linux", reason="cuDNN is asked on Linux"),
]

NETS = ("resnet50", "googlenet", "mobilenet_v2")
DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
EVERY = 1 if os.environ.get("DAGEXEC_ALL_GEOMETRIES") == "1" else 9
LIMIT = 256 << 20
"""Of workspace; a net's own limit is the operator's."""


@cache
def model_of(net: str, batch: int) -> Model:
    """A net, with its parameters."""
    return initialized(build(net, batch))


def problems(net: str, batch: int, dtype: Any, order: str) -> Iterator[ConvProblem]:
    """Each convolution of a net once."""
    model = model_of(net, batch)
    kind = np.dtype(dtype)
    given = {name: TensorType(tuple(array.shape), from_numpy(array.dtype)) for name, array in model.parameters.items()}
    size = 224
    given["data"] = TensorType((batch, 3, size, size), from_numpy(np.dtype(np.float32)))
    types = infer_net(build_graph(model.net), given).blobs
    seen = set()
    for definition in model.net.op:
        if definition.type != "Conv":
            continue
        call = OperatorCall(
            definition, arguments_of(definition, "Conv"), tuple(types[name] for name in definition.input), (), "Conv"
        )
        x, weights = (types[name].shape for name in definition.input[:2])
        y = types[definition.output[0]].shape
        axes, group = conv_window(call)[1], call.arguments.int("group", 1)
        if (x, weights, axes, group) in seen:
            continue
        seen.add((x, weights, axes, group))
        last = order == "NHWC"
        arrays = [np.empty((s[0], *s[2:], s[1]) if last else s, kind) for s in (x, weights, y)]
        yield ConvProblem(
            x=arrays[0], weights=arrays[1], bias=None, y=arrays[2], axes=axes, group=group, channels_last=last,
            work=compute_dtype(kind), limit=DEFAULT_LIMIT,
        )  # fmt: skip


def graphs(problem: ConvProblem) -> dict[str, ConvGraph]:
    """All that the engine may build for a convolution."""
    owner = cast(Any, SimpleNamespace(label="Conv"))

    def graph(operation: str, **more: Any) -> ConvGraph:
        return CudnnConvOperator.graph(owner, operation, problem, **more)

    return {
        "forward": graph(FORWARD),
        "bias": graph(FORWARD, bias=True),
        "bias, ReLU": graph(FORWARD, bias=True, relu=True),
        "residual, bias": graph(FORWARD, bias=True, residual=problem.y),
        "residual, bias, ReLU": graph(FORWARD, bias=True, residual=problem.y, relu=True),
        "data gradient": graph(DATA_GRADIENT),
        "filter gradient": graph(FILTER_GRADIENT),
    }


@pytest.mark.parametrize("order", ["NCHW", "NHWC"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("device", DEVICES)
def test_every_graph_of_real_nets_has_an_engine(device: str, dtype: str, order: str, tmp_path: Path) -> None:
    asked: list[tuple[str, ConvGraph]] = []
    for net in NETS:
        for problem in problems(net, 8, DTYPES[dtype], order):
            asked += [(f"{net}: {name}", graph) for name, graph in graphs(problem).items()]
    asked = asked[:: EVERY if dtype != "float32" else EVERY * 2]
    answers = ask(tmp_path, device, [(graph, PlanOptions(LIMIT)) for _, graph in asked], timeout=3000)
    refused = [(name, graph.name, answer["refused"]) for (name, graph), answer in zip(asked, answers, strict=True)
               if "refused" in answer]  # fmt: skip
    assert not refused
    assert all(answer["workspace"] <= LIMIT for answer in answers)


@pytest.mark.parametrize("device", DEVICES)
def test_options_take_engines_out_and_leave_some(device: str, tmp_path: Path) -> None:
    found = [next(problems("resnet50", 8, dtype, "NCHW")) for dtype in (np.float32, np.float16)]
    options = [
        PlanOptions(LIMIT, allow_tf32=True),
        PlanOptions(LIMIT, deterministic=True),
        PlanOptions(LIMIT, reduced_sums=True),
        PlanOptions(1, deterministic=True),
    ]
    kinds = ("forward", "bias, ReLU", "data gradient", "filter gradient")
    requests = [(graphs(problem)[kind], one) for problem in found for kind in kinds for one in options[:3]]
    requests.append((graphs(found[0])["forward"], options[3]))
    answers = ask(tmp_path, device, requests)
    assert all("refused" not in answer for answer in answers[:-1])
    for answer in answers[:-1]:
        assert answer["executed"].startswith("direct: RuntimeError")
        assert "handle" in answer["executed"]
    assert answers[-1].get("workspace", 0) <= 1


def test_what_has_no_engine_is_refused_and_not_an_error(tmp_path: Path) -> None:
    problem = next(problems("resnet50", 1, np.float32, "NCHW"))
    owner = cast(Any, SimpleNamespace(label="Conv"))
    without_bias = CudnnConvOperator.graph(owner, FORWARD, problem, relu=True)
    (answer,) = ask(tmp_path, "sm_90", [(without_bias, PlanOptions(LIMIT))])
    assert answer["refused"].startswith("cudnnGraphNotSupportedError")


def test_one_and_three_spatial_axes_have_engines(tmp_path: Path) -> None:
    def problem(dtype: Any, last: bool, sizes: tuple[int, ...]) -> ConvProblem:
        axes = tuple(Axis(size, 3, 1, 1, 1, 1, size) for size in sizes)
        shapes = [(2, 16, *sizes), (32, 8, *(3,) * len(sizes)), (2, 32, *sizes)]
        arrays = [np.empty((s[0], *s[2:], s[1]) if last else s, dtype) for s in shapes]
        return ConvProblem(
            x=arrays[0], weights=arrays[1], bias=None, y=arrays[2], axes=axes, group=2, channels_last=last,
            work=np.dtype(np.float32), limit=DEFAULT_LIMIT,
        )  # fmt: skip

    asked = [
        (name, graph)
        for dtype in DTYPES.values()
        for last in (False, True)
        for sizes in ((40,), (8, 12, 10))
        for name, graph in graphs(problem(dtype, last, sizes)).items()
    ]
    answers = ask(tmp_path, "sm_90", [(graph, PlanOptions(LIMIT)) for _, graph in asked])
    refused = [graph.name for (_, graph), answer in zip(asked, answers, strict=True) if "refused" in answer]
    assert not refused
