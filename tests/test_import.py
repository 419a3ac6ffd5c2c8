"""What `import dagexec` imports, and what it leaves until it is used. How long it takes: benchmarks/import_time.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import dagexec
from dagexec.ops.engines.onednn.binding import own_kernels
from dagexec.platform.lazy import LazyModule

ROOT = Path(__file__).resolve().parents[1]

PUT_OFF = (
    "anyio",
    "asyncio",
    "cupy",
    "cudnn",
    "dagexec.analysis",
    "dagexec.building",
    "dagexec.compiler.compilation",
    "dagexec.core.row_axes",
    "dagexec.devices.cuda.runtime",
    "dagexec.frontend.onnx",
    "dagexec.ops.families.conv",
    "dagexec.ops.engines.cuda",
    "dagexec.ops.engines.onednn.operator",
    "dagexec.compiler.passes",
    "dagexec.analysis.precision_report",
    "dagexec.storage.minidb",
    "dagexec.testing",
    "dagexec.training",
    "dagexec.compiler.tuning",
    "dagexec.zoo",
    "dagexec.pipelines",
    "dagexec.scheduler.observe.observed_run",
    "dagexec.scheduler.run.drain",
    "dagexec.scheduler.run.prediction",
    "dagexec.scheduling.catalog",
    "dagexec.executor.batching.axes",
    "dagexec.executor.telemetry.metrics",
    "dagexec.executor.telemetry.spans",
    "hashlib",
    "importlib.metadata",
    "lmdb",
    "matplotlib",
    "mpi4py",
    "networkx",
    "onnx",
    "onnxruntime",
    "opentelemetry",
    "rich",
    "safetensors",
    "sklearn",
    "statistics",
    "typer",
)


def imported_by(statements: str) -> set[str]:
    """The names of the modules that a new process has after `statements`."""
    code = f"import json, sys\n{statements}\njson.dump(sorted(sys.modules), sys.stdout)"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout))


ON_ASYNCIO = """
import asyncio, dagexec

async def main():
    async def compiling():
        await dagexec.compile_async("zoo:lenet")

    feeds = {"data": __import__("numpy").zeros((1, 1, 28, 28), "float32")}
    async with dagexec.compile_async("zoo:lenet") as executor:
        await executor.run_async(feeds, timeout=60)
        await executor.run_async(feeds)
        cancelled = asyncio.create_task(compiling())
        await asyncio.sleep(0)
        cancelled.cancel()
        await asyncio.wait([cancelled])
        assert cancelled.cancelled()
        assert await executor.drain_async(timeout=60)

asyncio.run(main())
"""


def test_importing_dagexec_leaves_out_what_most_callers_do_not_use() -> None:
    modules = imported_by("import dagexec")
    assert "dagexec.executor.executor" in modules
    assert [name for name in PUT_OFF if name in modules] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("statements", "module"),
    [
        ("dagexec.compile('zoo:lenet', optimize=False).close()", "dagexec.zoo"),
        ("dagexec.precision_report", "dagexec.analysis.precision_report"),
        (
            "from dagexec.core.registry import registered_engines as f; assert f('Relu', 'cuda')",
            "dagexec.ops.engines.cuda",
        ),
    ],
)
def test_what_was_left_out_is_there_when_it_is_asked_for(statements: str, module: str) -> None:
    assert module in imported_by(f"import dagexec\n{statements}")


@pytest.mark.slow
def test_compiling_and_running_on_own_kernels_imports_no_other_runtime_and_nothing_of_training() -> None:
    code = """import dagexec, dagexec.zoo, numpy
with dagexec.compile("zoo:lenet") as executor:
    executor.run({"data": numpy.zeros((1, 1, 28, 28), "float32")})
for name in dagexec.zoo.names():
    dagexec.zoo.architecture(name)
"""
    modules = imported_by(code)
    assert "dagexec.compiler.compilation" in modules
    assert [name for name in ("onnxruntime", "openvino", "dagexec.compiler.islands") if name in modules] == []
    assert [name for name in modules if name.startswith("dagexec.ops.") and name.endswith("gradient")] == []
    assert "dagexec.building.layers.dense" in modules
    assert [name for name in modules if name.startswith("dagexec.training")] == []


def test_a_lazy_module_is_imported_by_the_first_attribute_that_is_asked_of_it() -> None:
    code = "from dagexec.platform.lazy import LazyModule\nfound = LazyModule('colorsys')\n"
    assert "colorsys" not in imported_by(code)
    assert "colorsys" in imported_by(code + "assert found.rgb_to_hsv(1, 0, 0) == (0, 1, 1)")


def test_a_lazy_module_has_what_its_module_has_and_no_more() -> None:
    found = LazyModule("os.path")
    with ThreadPoolExecutor(2) as threads:
        assert set(threads.map(lambda _: found.join, range(2))) == {os.path.join}
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = found.no_such_thing
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        _ = LazyModule("no_such_module").anything


def test_all_public_names_are_there() -> None:
    assert [name for name in dagexec.__all__ if not hasattr(dagexec, name)] == []
    assert set(dagexec.__all__) <= set(dir(dagexec))
    with pytest.raises(AttributeError, match="module 'dagexec' has no attribute 'no_such_name'"):
        _ = dagexec.no_such_name  # type: ignore[attr-defined]


@pytest.mark.slow
def test_operators_of_cuda_are_made_from_dagexecs_own_whatever_a_caller_has_made_from_those_before() -> None:
    code = """
import dagexec
from dagexec.core.registry import operator, registered_engines, schema_of
from dagexec.core.schema import OpSchema
from dagexec.ops.families.reduction.axes import ReduceSum


@operator(OpSchema("CallersSum", inputs=(1, 1), outputs=(1, 1), infer=schema_of("ReduceSum").infer, doc="A sum."))
class CallersSum(ReduceSum):
    pass

assert registered_engines("ReduceSum", "cuda")
assert registered_engines("CallersSum") == ["DEFAULT"]
assert registered_engines("CallersSum", "cuda") == []
"""
    assert "dagexec.ops.engines.cuda" in imported_by(code)


def test_on_asyncio_nothing_imports_anyio_which_would_hold_the_loop_up() -> None:
    assert "anyio" not in imported_by(ON_ASYNCIO)


def test_without_cffi_our_own_kernels_compute() -> None:
    program = """
import sys
sys.modules["cffi"] = sys.modules["_cffi_backend"] = None
import numpy, dagexec
with dagexec.compile("zoo:lenet") as executor:
    outputs = executor.run({"data": numpy.zeros((1, 1, 28, 28), numpy.float32)})
    print({operator.engine for operator in executor.model.net.op} & {"ONEDNN"}, outputs["softmax"].sum())
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    engines, total = done.stdout.split(" ")
    assert engines == ("set()" if own_kernels() is None else "{'ONEDNN'}")
    assert float(total) == pytest.approx(1, abs=1e-5)
