"""Print, Summarize, Assert and EnforceFinite: what they log, and which runs they end."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from dagexec import NetDef, OperatorDef
from dagexec.errors import ArgumentError, AssertionFailedError, NonFiniteError, OperatorError, ShapeError
from dagexec.scheduler.nets.simple import SimpleNet
from tests.cuda.emulated import cuda_devices, has_compiler, has_gpu
from tests.ops.running import CUDA, operator_def, run_operator, workspace_of


def run(definition: OperatorDef, x: np.ndarray, times: int = 1) -> None:
    workspace = workspace_of({"x": x})
    with SimpleNet(NetDef(name="test", op=[definition]), workspace) as net:
        for _ in range(times):
            net.run()


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.getMessage().startswith("Print")]


def test_print_logs_type_shape_and_elements(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "dagexec"):
        run(operator_def("Print", ["x"], []), np.array([[1.5, -2]], np.float32))
    assert lines(caplog) == ["Print '' (operator 0) of net 'test': blob 'x' is float32[1, 2]: 1.5, -2.0"]


def test_print_logs_so_many_elements_at_most(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "dagexec"):
        run(operator_def("Print", ["x"], [], limit=2), np.arange(5))
    assert lines(caplog)[0].endswith("int64[5]: 0, 1, ... (5 in all)")


def test_print_logs_the_first_of_every_n_runs(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "dagexec"):
        run(operator_def("Print", ["x"], [], every_n=3), np.zeros(1), times=7)
    assert len(lines(caplog)) == 3


def test_print_to_a_file_goes_to_the_log_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "dagexec"):
        run(operator_def("Print", ["x"], [], to_file=1), np.zeros(1))
    assert ["to_file=1 is ignored" in line for line in lines(caplog)] == [True, False]


def test_print_refuses_a_period_of_0() -> None:
    with pytest.raises(ArgumentError, match="'every_n' must be at least 1"):
        run(operator_def("Print", ["x"], [], every_n=0), np.zeros(1))


def test_summarize_gives_extremes_mean_and_deviation(caplog: pytest.LogCaptureFixture) -> None:
    x = np.random.default_rng(0).normal(3, 2, (4, 5)).astype(np.float32)
    with caplog.at_level(logging.INFO, "dagexec"):
        [summary] = run_operator("Summarize", [x])
    wide = x.astype(np.float64)
    np.testing.assert_allclose(summary, [wide.min(), wide.max(), wide.mean(), wide.std(ddof=1)], rtol=1e-6)
    assert "20 elements: min " in caplog.text


def test_summarize_of_one_element_has_no_deviation() -> None:
    np.testing.assert_array_equal(run_operator("Summarize", [np.array([2.5])])[0], [2.5, 2.5, 2.5, 0])


def test_summarize_refuses_no_elements() -> None:
    with pytest.raises(ShapeError, match="no minimum"):
        run(operator_def("Summarize", ["x"], []), np.zeros((0, 2), np.float32))


@pytest.mark.parametrize("x", [np.array([True, True]), np.array([1, -2], np.int32), np.zeros(0, np.int64)])
def test_assert_passes_what_is_true(x: np.ndarray) -> None:
    run(operator_def("Assert", ["x"], []), x)


def test_assert_ends_the_run_with_its_message() -> None:
    definition = operator_def("Assert", ["x"], [], error_msg="labels start at 1")
    with pytest.raises(
        Exception, match="labels start at 1: 1 of 3 elements of blob 'x' are false, first \\[1\\]"
    ) as raised:
        run(definition, np.array([1, 0, 2]))
    assert isinstance(raised.value.__cause__ or raised.value, AssertionFailedError)


def test_enforce_finite_passes_numbers_and_other_types() -> None:
    for x in (np.zeros(3, np.float32), np.arange(3), np.array([True])):
        run(operator_def("EnforceFinite", ["x"], []), x)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_enforce_finite_ends_the_run(bad: float) -> None:
    with pytest.raises(OperatorError, match="1 of 3 elements of blob 'x'") as raised:
        run(operator_def("EnforceFinite", ["x"], []), np.array([0, bad, 1], np.float32))
    assert isinstance(raised.value.__cause__, NonFiniteError)


@pytest.mark.slow
@pytest.mark.skipif(not (has_compiler() or has_gpu()), reason="needs g++ or a GPU")
def test_on_cuda_they_tell_and_check_the_same(caplog: pytest.LogCaptureFixture) -> None:
    placed = [operator_def(kind, ["x"], []) for kind in ("Print", "EnforceFinite")]
    for definition in placed:
        definition.device_option.CopyFrom(CUDA.to_option())
    with cuda_devices(), caplog.at_level(logging.INFO, "dagexec"):
        run(placed[0], np.array([2.5], np.float32))
        with pytest.raises(OperatorError, match="1 of 2 elements of blob 'x@cuda:0'"):
            run(placed[1], np.array([0, np.nan], np.float32))
    assert lines(caplog)[0].endswith("float32[1]: 2.5")
