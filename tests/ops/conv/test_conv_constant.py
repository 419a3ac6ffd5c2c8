"""Filters that never change: what is derived from them serves every operator that shares it, and is computed once."""

from __future__ import annotations

import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest

from dagexec import NetDef, Workspace
from dagexec.core.constant import Constant
from dagexec.ops.families.conv import direct, fft, winograd
from dagexec.ops.families.conv.choice import ENGINES, algorithm_of
from dagexec.scheduler.nets.simple import SimpleNet
from tests.ops.conv.test_conv import Named
from tests.ops.problems import Case, Memory, run_algorithm, run_steps
from tests.ops.running import Array, operator_def, workspace_of
from tests.ops.windows import Geometry, convolve


class Filter:
    """One filter in two workspaces, as a constant and as an ordinary tensor."""

    def __init__(self, shape: tuple[int, ...], dtype: str) -> None:
        values = np.random.default_rng(5).integers(-3, 4, shape).astype(dtype)
        self._workspaces = Workspace(), Workspace()
        for workspace in self._workspaces:
            workspace.feed_blob("w", values)
        self._workspaces[1].get_blob("w").tensor().freeze()

    def outputs(self, op_type: str, shape: tuple[int, ...], engine: str, arguments: Named) -> list[Array]:
        """Y from the ordinary filter and from the constant one, for an image of `shape`."""
        found = []
        for workspace in self._workspaces:
            dtype = workspace.fetch_blob("w").dtype
            workspace.feed_blob("x", np.random.default_rng(6).integers(-3, 4, shape).astype(dtype))
            definition = operator_def(op_type, ["x", "w"], ["y"], kernel=3, **arguments, engine=engine)
            workspace.run_operator_once(definition)
            found.append(workspace.fetch_blob("y"))
        assert self._workspaces[1].get_blob("w").tensor().constant is not None
        return found


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("engine", ["", *sorted(ENGINES)])
def test_operators_of_other_groups_orders_and_directions_share_a_constant_filter(engine: str, dtype: str) -> None:
    """A filter of (4, 4, 3, 3) is one of 4 channels, or of 8 in 2 groups; one of (3, 3, 3, 3) is both orders' too."""
    even, cube = Filter((4, 4, 3, 3), dtype), Filter((3, 3, 3, 3), dtype)
    uses: list[tuple[Filter, str, tuple[int, ...], Named]] = [
        (even, "ConvTranspose", (1, 4, 6, 7), {"group": 1}),
        (even, "ConvTranspose", (1, 4, 6, 7), {"group": 2}),
        (even, "Conv", (1, 4, 6, 7), {"group": 1}),
        (even, "Conv", (1, 8, 6, 7), {"group": 2}),
        (even, "Conv", (1, 8, 9, 9), {"group": 2, "dilation": 2}),
        (even, "Conv", (1, 4, 28, 28), {"group": 1}),
        (even, "Conv", (1, 8, 28, 28), {"group": 2}),
        (cube, "ConvTranspose", (1, 3, 6, 7), {}),
        (cube, "ConvTranspose", (1, 6, 7, 3), {"order": "NHWC"}),
        (cube, "Conv", (1, 3, 6, 7), {}),
        (cube, "Conv", (1, 6, 7, 3), {"order": "NHWC"}),
        (cube, "Conv", (1, 9, 6, 7), {"group": 3}),
    ]
    for kept, op_type, shape, arguments in uses:
        ordinary, constant = kept.outputs(op_type, shape, engine, arguments)
        atol = 2e-4 if dtype == "float32" else 0.25  # sums below 256: a few roundings of float32, one of float16
        np.testing.assert_allclose(constant, ordinary, rtol=0, atol=atol, err_msg=f"{op_type} {shape} {arguments}")


def test_images_of_many_sizes_keep_one_spectrum_for_each_length_of_transform() -> None:
    constant = Constant()
    lengths = set()
    with patch.object(fft, "_filter_steps", wraps=fft._filter_steps) as transformed:
        for size in range(20, 60):
            problem = Case(Geometry((size,), (5,), (1,), (1,), (0, 0)), constant=True).problem()
            fft.FFT.steps(replace(problem, constant=constant), Memory().allocate)
            plan = fft.choose_plan(fft.Sizes.of(problem))
            assert plan is not None
            lengths.add(plan.cuts[0].size)
    assert transformed.call_count == len(lengths) < 20


def test_spectra_of_other_taps_and_dilations_are_kept_apart_though_transforms_are_as_long() -> None:
    constant, lengths = Constant(), []
    weights = np.random.default_rng(3).standard_normal((3, 2, 5))
    for dilation in (1, 2):
        for size in range(1, 24):
            geometry = Geometry((size,), (5,), (1,), (dilation,), (4 * dilation, 4 * dilation))
            case = Case(geometry, 2, dtype="float64")
            problem = replace(case.problem(), weights=weights, constant=constant)
            x, _, bias = case.arrays()
            expected = convolve(x, weights, bias, geometry, 1)
            for out in (problem.axes[0].out, min(4, size)):  # with few windows some taps read padding only
                part = replace(problem, axes=(replace(problem.axes[0], out=out),), y=problem.y[..., :out].copy())
                found = run_algorithm(fft.FFT, part)
                np.testing.assert_allclose(found, expected[..., :out], rtol=0, atol=1e-10, err_msg=f"{part.axes}")
                plan = fft.choose_plan(fft.Sizes.of(part))
                assert plan is not None
                lengths.append((plan.cuts[0].size, plan.cuts[0].taps, dilation))
    for same in range(1, 3):  # some are as long as others that differ in the taps only, or in the dilation only
        assert len({(row[0], row[same]) for row in lengths}) < len(set(lengths))


COMPUTED_BY = {
    "WINOGRAD": (winograd, "_transform_filters"),
    "FFT": (fft, "_filter_steps"),
    "DIRECT": (direct.np, "ascontiguousarray"),
}


@pytest.mark.parametrize("engine", sorted(ENGINES))
def test_threads_that_need_the_same_filter_at_once_wait_for_one_that_computes_it(engine: str) -> None:
    """As replicas do that are prepared at once."""
    case = Case(Geometry((14, 11), (3, 3), (1, 1), (1, 1), (1, 1, 1, 1)), 2, normal=True, constant=True)
    constant, threads = Constant(), 4
    all_here = threading.Barrier(threads)

    def compute(_: int) -> bytes:
        problem, memory = replace(case.problem(), constant=constant), Memory()
        all_here.wait(30)
        return run_steps(problem, algorithm_of(engine).steps(problem, memory.allocate), memory).tobytes()

    module, name = COMPUTED_BY[engine]
    with (
        patch.object(module, name, wraps=getattr(module, name)) as computed,
        ThreadPoolExecutor(threads) as pool,
    ):
        results = set(pool.map(compute, range(threads)))
    assert computed.call_count == 1
    assert len(results) == 1


@pytest.mark.slow
def test_what_was_derived_goes_with_the_values_when_the_filter_is_fed_anew() -> None:
    workspace = workspace_of({"w": np.ones((1, 1, 3, 3), np.float32), "x": np.ones((1, 1, 5, 5), np.float32)})
    workspace.get_blob("w").tensor().freeze()
    definition = operator_def("Conv", ["x", "w"], ["y"], kernel=3, engine="FFT")
    with SimpleNet(NetDef(name="n", op=[definition]), workspace) as net:
        net.run()
        constant = workspace.get_blob("w").tensor().constant
        assert constant is not None
        kept = weakref.ref(constant)
        del constant
        for value in (2, 3):
            workspace.feed_blob("w", np.full((1, 1, 3, 3), value, np.float32))
            net.run()
            np.testing.assert_allclose(workspace.fetch_blob("y"), np.full((1, 1, 3, 3), 9 * value), atol=1e-4)
        gc.collect()
        assert kept() is None
