"""Fixtures that several test modules use."""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
from collections.abc import Iterator

os.environ["DAGEXEC_CHOICES"] = "off"  # before anything of dagexec looks: what was measured elsewhere decides nothing
os.environ["DAGEXEC_TUNING_SECONDS"] = "0"
os.environ["DAGEXEC_KERNELS"] = "off"  # no test reads or leaves compiled kernels in the user's folder

import pytest
from hypothesis.internal.conjecture import providers

from dagexec.cli import main
from dagexec.core.choices import choices
from dagexec.core.registry import onnx_operator
from dagexec.frontend.onnx import forms, node
from tests import engines
from tests.command_line import Cli

pytest_plugins = ["tests.rewriting", "tests.selection"]

# Hypothesis would parse every module of dagexec for constants to draw: what a test draws would depend on which modules
# the tests before it imported, and parsing takes as long as collecting all tests.
providers.is_local_module_file = lambda _path: False


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--device cuda:0`: every operator that the tests run on the host runs there, too, and is compared."""
    parser.addoption("--device", help="cuda:0: run every operator there, too; emulated where there is no GPU")
    parser.addoption("--browser", action="store_true", help="run the tests in Chromium, too: make test-browser")
    parser.addoption("--ray", action="store_true", help="run the tests that start a Ray cluster, too: make test-ray")


def pytest_configure(config: pytest.Config) -> None:
    """Before any test module is imported: tests/ops/running.py reads the share of operators that run on CUDA."""
    device = config.getoption("--device")
    if device is None:
        return
    if device != "cuda:0":
        raise pytest.UsageError(f"--device {device}: only cuda:0 is offered")
    os.environ["DAGEXEC_ON_CUDA_EVERY"] = "1"


def pytest_collection() -> None:
    """What is collected stays: looking through all of it again and again for garbage would take a third of the time."""
    gc.disable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests marked `gpu` need one, `ray` and `browser` their options; `simulated` no `--device`."""
    reasons = {}
    if not config.getoption("--browser"):
        reasons["browser"] = "needs Chromium: make test-browser"
    if not config.getoption("--ray"):
        reasons["ray"] = "starts a Ray cluster: make test-ray"
    if config.getoption("--device") is not None:
        reasons["simulated"] = "is of the simulated device"
    needing_gpu = []
    for item in items:
        names = {mark.name for mark in item.iter_markers()}
        for name in names & reasons.keys():
            item.add_marker(pytest.mark.skip(reason=reasons[name]))
        if "gpu" in names:
            needing_gpu.append(item)
    if not needing_gpu:
        return
    from tests.cuda.emulated import has_gpu

    if not has_gpu():
        for item in needing_gpu:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device; this machine has none"))


def pytest_collection_finish() -> None:
    """Tests that collect garbage go through what was made since, not through all modules and tests again and again."""
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Which calls of the test's operators run on devices, too, and what it may compare, depends on the test alone."""
    from tests.ops.running import start_counting  # not before `pytest_configure`

    if choices.all():
        choices.forget()  # what was measured in one test decides nothing in another
    start_counting(item.nodeid)
    is_of_operator = item.nodeid.startswith("tests/ops/")  # which compares engines where they promise the same bytes
    engines.allowed[0] = is_of_operator or item.get_closest_marker("exact") is not None


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    """The event loops that tests which are coroutine functions run on; a module of asyncio alone has its own."""
    return str(request.param)


@pytest.fixture
def loggers_as_before() -> Iterator[None]:
    """What a server sets up for its log is taken back."""
    loggers = [logging.getLogger(name) for name in ("dagexec", "uvicorn")]
    before = [(logger.level, logger.propagate, list(logger.handlers)) for logger in loggers]
    yield
    for logger, (level, propagate, handlers) in zip(loggers, before, strict=True):
        logger.setLevel(level)
        logger.propagate, logger.handlers = propagate, handlers


@pytest.fixture(autouse=True, scope="session")
def interruptible() -> Iterator[None]:
    """Ctrl-C interrupts, also where whoever started the tests ignores it, as `nohup` and `&` in a script do."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(autouse=True, scope="session")
def engines_are_known() -> Iterator[None]:
    """Bytes that two engines computed cannot be compared."""
    with engines.engines_known():
        yield


@pytest.fixture
def plain_results() -> Iterator[None]:
    """Executors return plain arrays, for tests of their memory, and of how few functions a call passes."""
    with engines.engines_unknown():
        yield


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    """Run the command line in this process: exit status, standard output, standard error."""

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["dagexec", *map(str, arguments)])
        monkeypatch.setenv("COLUMNS", "200")
        try:
            main()
            status = 0
        except SystemExit as end:
            status = int(end.code or 0)
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


@pytest.fixture
def tables_are_foreign(monkeypatch: pytest.MonkeyPatch) -> None:
    """ONNX's operators on tables are left to other runtimes, as if dagexec had none of them."""
    monkeypatch.setattr(node, "onnx_operator", lambda *key: None if key[0] == "ai.onnx.ml" else onnx_operator(*key))
    monkeypatch.setattr(forms, "_known", {})
