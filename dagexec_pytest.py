"""The pytest plugin of dagexec: `pytest --explore` runs tests marked `explore` under many schedules of their threads.

It is a module beside the package so that pytest, which imports it wherever dagexec is installed, imports nothing else.
"""

from __future__ import annotations

import argparse
import inspect
import os
import shlex
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

_FOLDER = "dagexec-explore"


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--explore` and `--explore-seed`."""
    group = parser.getgroup("dagexec")
    group.addoption(
        "--explore", nargs="?", const=100, type=_count, metavar="N",
        help="run each test marked `explore` under N schedules of its threads and tasks (100)",
    )  # fmt: skip
    group.addoption(
        "--explore-seed", type=int, metavar="SEED", help="run each test marked `explore` under the schedule of SEED"
    )


def pytest_configure(config: pytest.Config) -> None:
    """The mark is known; the rest is there when it is asked for."""
    config.addinivalue_line(
        "markers",
        "explore(backend='asyncio'): with --explore, run the test under many schedules of its threads and tasks; a "
        "coroutine function runs on `backend`, asyncio or trio",
    )
    count, seed = config.getoption("explore"), config.getoption("explore_seed")
    if count is not None or seed is not None:
        config.pluginmanager.register(_Explorer(config, range(count) if seed is None else (seed,)), "dagexec-explorer")


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a number of schedules, found {text!r}; write --explore=100 {text}")
    return int(text)


class _Explorer:
    """Calls marked tests under the schedules of `seeds`."""

    def __init__(self, config: pytest.Config, seeds: range | tuple[int, ...]) -> None:
        self._seeds = seeds
        cache = getattr(config, "cache", None)
        self._folder: Path | None = None if cache is None else cache.mkdir(_FOLDER)
        self._died = _died(self._folder)

    def pytest_report_header(self) -> list[str]:
        """Which schedules there are, and those in which an earlier run died."""
        seeds = f"seeds 0 to {self._seeds[-1]}" if len(self._seeds) > 1 else f"seed {self._seeds[0]}"
        return [f"explore: {seeds}", *(f"explore: a process died in a schedule; again: {line}" for line in self._died)]

    @pytest.hookimpl(tryfirst=True)
    def pytest_pyfunc_call(self, pyfuncitem: pytest.Function) -> bool | None:
        """Explore a marked test."""
        mark = pyfuncitem.get_closest_marker("explore")
        if mark is None:
            return None
        from dagexec.testing.exploring import explore_seeds_of

        names = pyfuncitem._fixtureinfo.argnames
        function = partial(_original(pyfuncitem.obj), **{name: pyfuncitem.funcargs[name] for name in names})
        repeat = partial(_repeat, pyfuncitem.nodeid)
        explore_seeds_of(function, self._seeds, mark.kwargs.get("backend", "asyncio"), repeat, self._folder)
        return True


def _original(function: Callable[..., Any]) -> Callable[..., Any]:
    """The coroutine function that a plugin for asyncio has wrapped; any other function as it is."""
    inner = inspect.unwrap(function)
    return inner if inspect.iscoroutinefunction(inner) else function


def _repeat(test: str, seed: int) -> str:
    return f"pytest {shlex.quote(test)} --explore-seed={seed}"


def _died(folder: Path | None) -> list[str]:
    """What is noted of processes that are no more. The notes are taken away."""
    found = []
    for path in sorted(folder.glob("*.txt") if folder is not None else ()):
        process = path.stem.rpartition("-")[2]
        if process.isdecimal() and not _is_alive(int(process)):
            found.append(path.read_text(errors="replace").strip())
            path.unlink(missing_ok=True)
    return found


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
