"""Machines that are not as expected: few cores, quotas, other OpenMP runtimes, memory that must not be executable.

Each test is a process of its own that runs a net in several ways (tests/odd_machine.py). One that hangs is ended.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dagexec.ops.engines.onednn.binding import library
from dagexec.platform.processor import available_cores
from tests.odd_machine import WAYS

LIMIT_SECONDS = 120
"""Against a hang: what takes longest here takes ten."""

ROOT = Path(__file__).parents[2]
OWN_SETTINGS = ("GOMP_", "KMP_", "MKL_", "OMP_", "DAGEXEC_JOIN")

FEW = ("chosen", "simple", "dag, 2 workers", "dag, 2 pieces", "async_dag, 64 workers")

pytestmark = pytest.mark.slow  # nearly every test starts processes
needs_onednn = pytest.mark.skipif(library() is None, reason="needs oneDNN")
needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="is of Linux")
needs_two_cores = pytest.mark.skipif(available_cores() < 2, reason="needs two cores")


def python(
    program: str,
    *,
    environment: Mapping[str, str] | None = None,
    start: tuple[str, ...] = (),
    options: tuple[str, ...] = (),
) -> tuple[str, str]:
    """What a process prints and logs that runs `program`; `start` goes before the interpreter, `options` after it."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(OWN_SETTINGS)}
    done = subprocess.run(
        [*start, sys.executable, *options, "-c", program],
        env=kept | {"PYTHONPATH": str(ROOT), **(environment or {})},
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout, done.stderr


def report(
    ways: tuple[str, ...],
    *,
    before: str = "",
    after: str = "",
    then: str = "",
    environment: Mapping[str, str] | None = None,
    start: tuple[str, ...] = (),
    options: tuple[str, ...] = (),
) -> dict[str, Any]:
    """What a process reports that runs the net in `ways`, and its log.

    Code to be run `before` dagexec is imported, `after` it, and `then`, between two runs.
    """
    program = "\n".join(
        (
            "import logging, sys",
            "logging.basicConfig(level=logging.INFO, format='%(message)s', stream=sys.stderr)",
            before,
            "from tests.odd_machine import report",
            after,
            f"report({list(ways)!r}, lambda: exec({then!r}))",
        )
    )
    printed, logged = python(program, environment=environment, start=start, options=options)
    found: dict[str, Any] = json.loads(printed.splitlines()[-1])
    return found | {"log": logged.splitlines()}


@pytest.fixture(scope="module")
def usual() -> dict[str, Any]:
    """What is reported where nothing is odd."""
    return report(("simple",))


def assert_same_bytes(found: Mapping[str, Any], usual: Mapping[str, Any], ways: tuple[str, ...]) -> None:
    """Every run of every way gave what one worker gives on a usual machine."""
    assert found["digests"] == dict.fromkeys(ways, usual["digests"]["simple"])


def assert_computed_otherwise(found: Mapping[str, Any], usual: Mapping[str, Any]) -> None:
    """The ways agree with each other to the byte, and with oneDNN as numbers."""
    digests = list(found["digests"].values())
    assert all(one == digests[0] for one in digests)
    assert len(digests[0]) == 1
    np.testing.assert_allclose(found["values"], usual["values"], rtol=1e-5, atol=1e-7)


class TestFewCores:
    @needs_linux
    def test_on_one_core_everything_runs_on_one_worker(self, usual: dict[str, Any]) -> None:
        one = str(min(os.sched_getaffinity(0)))
        found = report(tuple(WAYS), start=("taskset", "-c", one))
        assert_same_bytes(found, usual, tuple(WAYS))
        assert found["cores"] == 1
        assert found["chosen"] == 1

    @needs_linux
    def test_on_one_core_tuning_measures_and_chooses_one_worker(self) -> None:
        program = """
import dagexec
from dagexec.compiler.compilation import compile_model
from dagexec.options import CompileOptions
from tests.odd_machine import branching_model
compiled = compile_model(branching_model(), CompileOptions(tuning_seconds=2.0))
print(compiled.options.num_workers, compiled.options.net_type)
"""
        printed, _ = python(program, start=("taskset", "-c", str(min(os.sched_getaffinity(0)))))
        assert printed.split() == ["1", "simple"]

    @needs_two_cores
    def test_64_workers_and_64_callers_get_the_same_bytes(self, usual: dict[str, Any]) -> None:
        assert_same_bytes(report(tuple(WAYS)), usual, tuple(WAYS))

    @needs_two_cores
    @pytest.mark.parametrize("switched_off", [("DAGEXEC_ONEDNN",), ("DAGEXEC_ONEDNN", "DAGEXEC_OWN_KERNELS")])
    def test_64_workers_compute_without_onednn(self, usual: dict[str, Any], switched_off: tuple[str, ...]) -> None:
        ways = ("simple", "async_dag, 64 workers", "64 replicas, 64 workers")
        assert_computed_otherwise(report(ways, environment=dict.fromkeys(switched_off, "off")), usual)


class ControlGroup:
    """A control group of this machine, with a limit."""

    def __init__(self, folder: Path, limits: Mapping[str, str]) -> None:
        """`limits` gives what is written to the first of these files that there is."""
        self._folder = folder
        self._limits = limits

    def __enter__(self) -> Path:
        self._folder.mkdir()
        file = next((file for file in self._limits if (self._folder / file).exists()), None)
        if file is None:
            raise FileNotFoundError(f"{self._folder}: none of {list(self._limits)}")
        (self._folder / file).write_text(self._limits[file])
        return self._folder

    def __exit__(self, *_exc: object) -> None:
        self._folder.rmdir()


def limited_group(controller: str, limits: Mapping[str, str]) -> Iterator[Path]:
    """The folder of a control group; skips where none can be made."""
    name = f"dagexec-test-{os.getpid()}"
    with ExitStack() as stack:
        for parent in (Path("/sys/fs/cgroup") / controller, Path("/sys/fs/cgroup")):
            try:
                folder = stack.enter_context(ControlGroup(parent / name, limits))
            except OSError:
                (parent / name).is_dir() and (parent / name).rmdir()
                continue
            yield folder
            return
        pytest.skip("no control group can be made here")


@pytest.fixture
def one_core_group() -> Iterator[Path]:
    """A control group with a quota of one core."""
    yield from limited_group("cpu", {"cpu.max": "100000 100000", "cpu.cfs_quota_us": "100000"})


@pytest.fixture
def small_group() -> Iterator[Path]:
    """A control group with 300 MiB of memory."""
    nbytes = str(300 << 20)
    yield from limited_group("memory", {"memory.max": nbytes, "memory.limit_in_bytes": nbytes})


class TestQuota:
    @needs_two_cores
    def test_in_a_control_group_with_less_than_the_cores_no_more_threads_are_chosen(
        self, one_core_group: Path, usual: dict[str, Any]
    ) -> None:
        join = f"import os\nopen('{one_core_group}/cgroup.procs', 'w').write(str(os.getpid()))"
        found = report(FEW, before=join)
        assert_same_bytes(found, usual, FEW)
        assert found["cores"] == 1
        assert found["chosen"] == 1

    @needs_two_cores
    def test_in_a_made_up_control_group_likewise(self, tmp_path: Path) -> None:
        (tmp_path / "cpu.max").write_text("150000 100000")
        found = report(
            ("chosen",),
            before="import pathlib; from dagexec.platform import cgroups\n"
            f"cgroups._ROOT = pathlib.Path({str(tmp_path)!r})",
        )
        assert found["cores"] == 1
        assert found["chosen"] == 1


TOO_LARGE = """
import numpy as np, dagexec
from dagexec.errors import ResourceError
from dagexec.core.model import InputInfo, Model
from dagexec.core.dtypes import FLOAT32
net = dagexec.NetDef(name="n")
operator = net.op.add(type="Tile", input=["x"], output=["y"])
operator.arg.add(name="tiles", i=400)
operator.arg.add(name="axis", i=0)
model = Model("n", net, None, {}, {"x": InputInfo(FLOAT32, (None,))}, ("y",))
with dagexec.compile(model) as executor:
    try:
        executor.run({"x": np.ones(1 << 18, np.float32)})  # 400 MiB
    except ResourceError as error:
        print(error)
    print(len(executor.run({"x": np.ones(1 << 15, np.float32)})["y"]))  # 50 MiB
"""


class TestMemory:
    def test_in_a_control_group_a_net_that_does_not_fit_is_refused_and_nothing_is_killed(
        self, small_group: Path
    ) -> None:
        join = f"import os\nopen('{small_group}/cgroup.procs', 'w').write(str(os.getpid()))"
        printed, _ = python(join + TOO_LARGE)
        refused, elements = printed.splitlines()
        assert "Tile 'y' (operator 0) of net 'n': output 'y' float32[104857600] needs 419,430,400 bytes" in refused
        assert f"the control group {small_group} (limit 314,572,800) has" in refused
        assert int(elements) == 400 << 15

    @needs_linux
    def test_with_a_limited_address_space_likewise(self) -> None:
        limit = "import resource\nresource.setrlimit(resource.RLIMIT_AS, (1 << 29, 1 << 29))"
        printed, _ = python(limit + TOO_LARGE, environment={"OPENBLAS_NUM_THREADS": "1"})
        refused, elements = printed.splitlines()
        assert "the address space of this process (limit 536,870,912) has" in refused
        assert int(elements) == 400 << 15


def openmp_runtimes() -> dict[str, Path]:
    """Other OpenMP runtimes that are installed here, by name."""
    packages = Path(sysconfig.get_path("purelib"))
    files = [
        *packages.glob("scikit_learn.libs/libgomp*.so*"),
        *packages.glob("cmeel.prefix/lib/libomp.so"),
        *Path(sys.prefix).glob("lib/libiomp5.so"),
    ]
    return {path.name.partition(".")[0].partition("-")[0]: path for path in files}


NAMES = ("libgomp", "libiomp5", "libomp")
RUNTIMES = openmp_runtimes()
LOADING = "import ctypes; ctypes.CDLL({path!r}, mode=ctypes.{mode}).omp_get_max_threads()"
PRODUCT = "import torch; a = torch.ones(300, 300); assert float((a @ a)[0, 0]) == 300.0"


@needs_onednn
class TestOtherOpenMP:
    @pytest.mark.parametrize("when", ["before", "after", "then"])
    @pytest.mark.parametrize("mode", ["RTLD_LOCAL", "RTLD_GLOBAL"])
    @pytest.mark.parametrize("name", NAMES)
    def test_another_runtime_in_the_process_changes_nothing(
        self, name: str, mode: str, when: str, usual: dict[str, Any]
    ) -> None:
        if name not in RUNTIMES:
            pytest.skip("needs the packages scikit-learn, intel-openmp or cmeel-libomp")
        found = report(FEW, **{when: LOADING.format(path=str(RUNTIMES[name]), mode=mode)})  # type: ignore[arg-type]
        assert_same_bytes(found, usual, FEW)

    @pytest.mark.parametrize("name", NAMES)
    def test_threads_are_set_where_the_library_asks_for_them(self, name: str) -> None:
        if name not in RUNTIMES:
            pytest.skip("needs the packages scikit-learn, intel-openmp or cmeel-libomp")
        loading = LOADING.format(path=str(RUNTIMES[name]), mode="RTLD_GLOBAL")
        assert python(f"{loading}\n{SINGLE}")[0] == python(SINGLE)[0]

    @pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs PyTorch")
    @pytest.mark.parametrize("when", ["before", "after", "then"])
    def test_pytorch_computes_in_the_same_process(self, when: str, usual: dict[str, Any]) -> None:
        found = report(FEW, **{when: PRODUCT})  # type: ignore[arg-type]
        assert_same_bytes(found, usual, FEW)


SINGLE = """
import hashlib
import numpy as np
from tests.ops.running import run_operator
numbers = np.random.default_rng(0)
shapes = (8, 64, 28, 28), (64, 64, 3, 3), (8, 64, 28, 28)
inputs = [numbers.standard_normal(shape, np.float32) for shape in shapes]
(gradient, _) = run_operator("ConvGradient", inputs, 2, engine="ONEDNN", kernel=3, pad=1, no_bias=1)
print(hashlib.sha256(gradient.tobytes()).hexdigest())
"""
"""A sum whose bytes depend on the number of threads, on one."""

SETTINGS = [
    {"OMP_THREAD_LIMIT": "1"},
    {"OMP_DYNAMIC": "true"},
    {"OMP_MAX_ACTIVE_LEVELS": "0"},
    {"OMP_NUM_THREADS": "1"},
    {"OMP_NUM_THREADS": "64", "MKL_NUM_THREADS": "64", "OPENBLAS_NUM_THREADS": "64"},
    {"KMP_AFFINITY": "compact", "KMP_BLOCKTIME": "infinite"},
    {"OMP_WAIT_POLICY": "active"},
]
BINDING = [{"OMP_PROC_BIND": "close"}, {"OMP_PLACES": "cores"}, {"GOMP_CPU_AFFINITY": "0"}]


def named(settings: Mapping[str, str]) -> str:
    return " ".join(f"{name}={value}" for name, value in settings.items())


@needs_onednn
class TestOpenMPSettings:
    @pytest.mark.parametrize("settings", SETTINGS, ids=named)
    def test_numbers_and_waiting_change_no_byte(self, settings: dict[str, str], usual: dict[str, Any]) -> None:
        assert_same_bytes(report(FEW, environment=settings), usual, FEW)

    @needs_linux
    @pytest.mark.parametrize("settings", BINDING, ids=named)
    def test_no_thread_is_bound_to_a_core_and_later_processes_see_the_setting(
        self, settings: dict[str, str], usual: dict[str, Any]
    ) -> None:
        (name,) = settings
        told = f"import os, sys; print('seen', os.environ[{name!r}], len(os.sched_getaffinity(0)), file=sys.stderr)"
        found = report(FEW, then=told, environment=settings)
        assert_same_bytes(found, usual, FEW)
        assert f"seen {settings[name]} {len(os.sched_getaffinity(0))}" in found["log"]


FORBID = """
import ctypes
assert ctypes.CDLL(None, use_errno=True).prctl(65, 1, 0, 0, 0) == 0
"""


def can_forbid() -> bool:
    """True where a process can be denied to execute what it wrote: prctl's PR_SET_MDWE, from Linux 6.3 on."""
    done = subprocess.run([sys.executable, "-c", FORBID], capture_output=True, check=False)
    return sys.platform == "linux" and done.returncode == 0


@pytest.mark.skipif(not can_forbid(), reason="needs PR_SET_MDWE of Linux 6.3")
class TestMemoryThatMustNotBeExecutable:
    def test_numpy_computes_and_one_line_says_why(self, usual: dict[str, Any]) -> None:
        found = report(FEW, before=FORBID)
        assert_computed_otherwise(found, usual)
        assert not found["onednn"]
        lines = [line for line in found["log"] if line.startswith("oneDNN is not available")]
        assert len(lines) == (library() is not None)
        assert all("this process may not execute memory that it wrote" in line for line in lines)

    @needs_onednn
    def test_forbidden_after_onednn_was_loaded_numpy_computes_what_is_new(self, usual: dict[str, Any]) -> None:
        found = report(FEW, after="from dagexec.ops.engines.onednn.binding import library; library()\n" + FORBID)
        assert_computed_otherwise(found, usual)
        assert len([line for line in found["log"] if "oneDNN cannot generate code" in line]) == 1

    @needs_onednn
    def test_forbidden_between_two_runs_what_was_made_goes_on(self, usual: dict[str, Any]) -> None:
        assert_same_bytes(report(("simple",), then=FORBID), usual, ("simple",))


PATIENT = "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); os.execv(sys.executable, sys.argv[1:])"


def test_the_suite_can_interrupt_where_ctrl_c_is_ignored() -> None:
    """As under nohup in a script: tests that wait for KeyboardInterrupt get it."""
    test = "tests/executor/test_embedding_failures.py::test_ctrl_c_stops_the_run_and_every_thread_stays"
    ignoring = [sys.executable, "-c", PATIENT, sys.executable, "-m", "pytest", "-p", "no:cacheprovider", test]
    done = subprocess.run(ignoring, capture_output=True, text=True, timeout=LIMIT_SECONDS, cwd=ROOT)
    assert done.returncode == 0, done.stdout
