"""Plans of engine CUDNN: which are built, kept and searched for, and what serves where there is none."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dagexec.core.choices import choices
from dagexec.devices.cuda.cudnn_graph import aligned
from dagexec.devices.cuda.cudnn_handle import CudnnHandle
from dagexec.devices.cuda.cudnn_plans import PlanOptions, plan_cache
from dagexec.devices.cuda.runtime import cuda_runtime
from dagexec.errors import DeviceError, UnsupportedFeatureError
from dagexec.scheduler.nets.async_dag import AsyncDAGNet
from tests.cuda.emulated.cudnn import CudnnModule, Engine, emulated_cudnn, numerical_note
from tests.cuda.test_cudnn import CUDA, LIMIT, conv_graph, executed
from tests.cuda.test_cudnn_states import branches
from tests.ops.running import on_device, operator_def


def test_options_take_engines_out() -> None:
    with emulated_cudnn():
        plans, graph = plan_cache(cuda_runtime(CUDA)), conv_graph()

        def workspace(**options: Any) -> int:
            return plans.get(graph, PlanOptions(**{"limit": LIMIT, **options})).workspace_nbytes

        assert workspace(allow_tf32=True) == 4096
        assert workspace() == 1 << 16
        assert workspace(deterministic=True) == 2048
        assert workspace(deterministic=True, limit=100) == 0
        assert plans.built == 4


def test_the_refused_notes_of_16_bit_data_are_others() -> None:
    with emulated_cudnn():
        assert numerical_note.TENSOR_CORE not in PlanOptions(LIMIT).refused_notes("float16")
        assert PlanOptions(LIMIT).refused_notes("float16") == [numerical_note.REDUCED_PRECISION_REDUCTION]
        assert PlanOptions(LIMIT, reduced_sums=True).refused_notes("bfloat16") == []


def test_one_thread_builds_a_plan_and_others_wait_for_it() -> None:
    with emulated_cudnn() as (_, module):
        plans = plan_cache(cuda_runtime(CUDA))
        started, go_on = threading.Event(), threading.Event()

        def pause(what: str) -> None:
            started.set()
            go_on.wait(30)

        module.pause = pause
        found: list[object] = []
        threads = [
            threading.Thread(target=lambda: found.append(plans.get(conv_graph(), PlanOptions(LIMIT)))) for _ in range(6)
        ]
        for thread in threads:
            thread.start()
        assert started.wait(30)
        go_on.set()
        for thread in threads:
            thread.join(30)
        assert len(found) == 6
        assert len(set(map(id, found))) == 1
        assert plans.built == 1


def test_plans_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dagexec.devices.cuda.cudnn_plans.MAX_PLANS", 2)
    with emulated_cudnn():
        plans = plan_cache(cuda_runtime(CUDA))
        for size in (5, 6, 5, 7, 5, 6):
            plans.get(conv_graph(size=size), PlanOptions(LIMIT))
        assert len(plans) == 2
        assert plans.built == 4


def test_a_geometry_without_an_engine_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    with emulated_cudnn() as (_, module):
        module.engines = ()
        plans = plan_cache(cuda_runtime(CUDA))
        with caplog.at_level(logging.WARNING, "dagexec"):
            for _ in range(3):
                with pytest.raises(UnsupportedFeatureError, match="no engine for the forward convolution"):
                    plans.get(conv_graph(), PlanOptions(LIMIT))
        assert len(caplog.records) == 1
        x, weights = np.ones((1, 2, 4, 4), np.float32), np.ones((2, 2, 3, 3), np.float32)
        definition = operator_def("Conv", ["x", "w"], ["y"], kernel=3)
        definition.engine = "CUDNN"
        (y,) = on_device(CUDA, definition, {"x": x, "w": weights})
        assert (y == 18).all()


def test_a_graph_that_fails_for_another_reason_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with emulated_cudnn():
        plans = plan_cache(cuda_runtime(CUDA))

        def fail(_graph: object) -> None:
            raise RuntimeError("out of memory")

        with monkeypatch.context() as patched:
            patched.setattr("tests.cuda.emulated.cudnn.Graph.check_support", fail)
            with pytest.raises(UnsupportedFeatureError, match=r"cuDNN fails at .* out of memory"):
                plans.get(conv_graph(), PlanOptions(LIMIT))
        assert plans.get(conv_graph(), PlanOptions(LIMIT)).workspace_nbytes == 1 << 16


def test_a_plan_that_cannot_be_built_gives_way_to_the_next() -> None:
    with emulated_cudnn() as (_, module):
        plans = plan_cache(cuda_runtime(CUDA))
        failing = [1]

        def fail(_what: str) -> None:
            if failing:
                failing.pop()
                raise RuntimeError("this one is broken")

        module.pause = fail
        assert plans.get(conv_graph(), PlanOptions(LIMIT)).engine == "eng1"
        failing += [1] * 9
        with pytest.raises(UnsupportedFeatureError, match="none of its plans can be built: this one is broken"):
            plans.get(conv_graph(size=7), PlanOptions(LIMIT))


def test_a_search_measures_the_engines_and_its_choice_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    engines = (
        Engine("slow", repeats=60),
        Engine("too large", workspace=2 * LIMIT),
        Engine("fast", workspace=512),
        Engine("rounds", (numerical_note.TENSOR_CORE,)),
    )
    options = PlanOptions(LIMIT, exhaustive=True)
    monkeypatch.setenv("DAGEXEC_CHOICES", str(tmp_path / "choices.json"))
    choices.forget()
    try:
        with emulated_cudnn() as (machine, module):
            module.engines = engines
            assert plan_cache(cuda_runtime(CUDA)).get(conv_graph(), options).engine == "fast"
            names = {call.arguments[1] for call in executed(machine)}
            assert names == {"slow", "fast"}
        choices.forget()
        with emulated_cudnn() as (machine, module):
            module.engines = engines
            plans = plan_cache(cuda_runtime(CUDA))
            assert plans.get(conv_graph(), options).engine == "fast"
            assert plans.get(conv_graph(), PlanOptions(LIMIT)).engine == "slow"
            deterministic = PlanOptions(LIMIT, deterministic=True, exhaustive=True)
            assert plans.get(conv_graph(), deterministic).engine == "slow"
            assert not executed(machine)
    finally:
        choices.forget()


@pytest.mark.parametrize("deterministic", [0, 1])
def test_the_arguments_of_an_operator_are_what_its_plans_are_asked_for(deterministic: int) -> None:
    definition = operator_def("Conv", ["x", "w"], ["y"], kernel=3, deterministic=deterministic, ws_nbytes_limit=4000)
    definition.engine = "CUDNN"
    arrays = {"x": np.ones((1, 2, 4, 4), np.float32), "w": np.ones((2, 2, 3, 3), np.float32)}
    with emulated_cudnn() as (machine, module):
        module.engines = (
            Engine("large", workspace=4001),
            Engine("atomics", (numerical_note.NONDETERMINISTIC,)),
            Engine("steady"),
        )
        on_device(CUDA, definition, arrays)
        assert [call.arguments[1] for call in executed(machine)] == ["steady" if deterministic else "atomics"]


def test_addresses_are_of_16_bytes() -> None:
    assert aligned([0, 16, 4096])
    assert not aligned([16, 24])


# A library that is missing


def raising(error: BaseException) -> Callable[[], int]:
    def version() -> int:
        raise error

    return version


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda module: setattr(module, "version", 8907), "cuDNN 8907 is too old, 90000 .* pip install"),
        (
            lambda module: setattr(module, "backend_version", raising(RuntimeError("no libcudnn.so.9"))),
            "cuDNN cannot be loaded .no libcudnn.so.9.; .*pip install",
        ),
    ],
)
def test_without_a_library_that_serves_the_default_engine_computes(
    spoil: Callable[[CudnnModule], None], message: str, caplog: pytest.LogCaptureFixture
) -> None:
    with emulated_cudnn() as (machine, module):
        spoil(module)
        with pytest.raises(DeviceError, match=message):
            CudnnHandle(cuda_runtime(CUDA), "mine")
        net, workspace = branches([None, 1])
        with caplog.at_level(logging.WARNING, "dagexec"), AsyncDAGNet(net, workspace) as running:
            running.run(timeout=60)
            assert all(operator.library_state is None for operator in running.operators)
        assert not executed(machine)
    assert len(caplog.records) <= 1


def test_a_state_that_does_not_exist_is_refused() -> None:
    with emulated_cudnn():
        net, workspace = branches([4])
        with pytest.raises(DeviceError, match="library state 4 of cuda:0: expected 0 to 3"):
            AsyncDAGNet(net, workspace)
