"""The options of `dagexec.compile`: one value, each field of which is declared and described once."""

from __future__ import annotations

import gc
import inspect
import re
import weakref
from dataclasses import MISSING, fields, replace
from typing import Any

import numpy as np
import pytest

import dagexec
from dagexec.core.node import arguments_of
from dagexec.errors import DeviceError, SettingError
from dagexec.options import CompileOptions
from dagexec.scheduler.nets.options import RunOptions
from tests.held import doubled_model


def described(documented: type) -> list[str]:
    return re.findall(r"^ {8}(\w+): ", documented.__doc__ or "", re.MULTILINE)


def test_every_field_is_described_where_it_is_declared() -> None:
    of_nets = [field.name for field in fields(RunOptions)]
    assert described(RunOptions) == of_nets
    assert described(CompileOptions) == [field.name for field in fields(CompileOptions) if field.name not in of_nets]


def test_compile_takes_every_field_as_a_keyword_and_describes_it() -> None:
    _, options, *keywords = inspect.signature(dagexec.compile).parameters.values()
    assert options.default is None
    assert {one.name: one.default for one in keywords} == {one.name: one.default for one in fields(CompileOptions)}
    assert MISSING not in {one.default for one in keywords}
    described_by_compile = inspect.getdoc(dagexec.compile) or ""
    assert [one.name for one in keywords if f"\n    {one.name}: " not in described_by_compile] == []


def test_options_are_a_value_or_keywords_or_a_value_and_what_differs() -> None:
    value = CompileOptions(net_type="dag", num_workers=2, optimize=False)
    for executor in (
        dagexec.compile(doubled_model(), value),
        dagexec.compile(doubled_model(), net_type="dag", num_workers=2, optimize=False),
        dagexec.compile(doubled_model(), replace(value, num_workers=1), num_workers=2),
    ):
        with executor:
            assert (executor.net_type, executor.num_workers) == ("dag", 2)


def test_a_keyword_that_is_no_option_is_refused() -> None:
    with pytest.raises(TypeError, match="'nettype'"):
        dagexec.compile(doubled_model(), nettype="dag")  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"streams_per_worker": 0}, SettingError, "at least 1 stream per worker is needed, found 0"),
        ({"stream_priority": "urgent"}, SettingError, "stream_priority is 'normal' or 'high', not 'urgent'"),
        ({"device": "gpu"}, DeviceError, "device 'gpu' is unknown"),
        ({"capture": True}, DeviceError, "on cpu there is nothing to capture"),
        ({"capture": True, "device": "sim:0", "net_type": "dag"}, SettingError, "capture is for net type 'async_dag'"),
        ({"dtype": "float16"}, SettingError, "dtype 'float16' is for cuda:N"),
        ({"layout": "NCHW16c", "device": "sim:0"}, SettingError, "layout is one of NHWC, NCHW on sim:0"),
        ({"nan": "some"}, SettingError, "nan is one of kept, any, not 'some'"),
        ({"preparation_bytes": -1}, SettingError, "preparation_bytes must be 0 or more, or None, not -1"),
        ({"max_queued": -1}, SettingError, "max_queued must be 0 or more, or None, not -1"),
    ],
)
def test_options_are_checked_when_they_are_made(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        CompileOptions(**options)


@pytest.mark.parametrize("optimize", [True, False])
def test_operators_are_batch_invariant_unless_asked_otherwise(optimize: bool) -> None:
    for wanted, options in ((True, CompileOptions()), (False, CompileOptions(batch_invariant=False))):
        with dagexec.compile(doubled_model(), options, optimize=optimize) as executor:
            found = {arguments_of(one, "op").bool("batch_invariant", True) for one in executor.model.net.op}
        assert found == {wanted}


def test_inputs_for_calibration_are_read_once() -> None:
    given = ({"x": np.full(1, number)} for number in range(3))
    options = replace(CompileOptions(calibration=given), replicas=2)
    assert [feeds["x"][0] for feeds in options.calibration_runs] == [0, 1, 2]
    assert CompileOptions(calibration={"x": [1]}).calibration_runs == ({"x": [1]},)


def test_an_executor_holds_on_to_nothing_that_only_compilation_needs() -> None:
    class Progress:
        def __call__(self, stage: str) -> None:
            pass

    progress, inputs = Progress(), {"x": np.ones((1, 3), np.float32)}
    seen = [weakref.ref(progress), weakref.ref(inputs["x"])]
    with dagexec.compile(doubled_model(), progress=progress, calibration=[inputs], tuning_seconds=0):
        del progress, inputs
        gc.collect()
        assert [one() for one in seen] == [None, None]
