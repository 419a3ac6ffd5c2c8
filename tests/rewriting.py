"""Workers of xdist share the rewriting of asserts, half of what collecting all files takes in a fresh checkout.

Each of them collects all files, in the same order and at the same time, and so would rewrite each. Instead each
rewrites a part of the files first, and finds the others as the other workers have written them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from _pytest.assertion import rewrite

ROOT = Path(__file__).parent.parent


def pytest_sessionstart(session: pytest.Session) -> None:
    """Rewrite what is this worker's; the first one collects the files that are its part before all others."""
    worker = getattr(session.config, "workerinput", None)
    if worker is None or sys.dont_write_bytecode or not _is_all(session.config):
        return
    number, count = int(worker["workerid"].removeprefix("gw")), worker["workercount"]
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    if number:
        rewrite_asserts(files[number * len(files) // count : (number + 1) * len(files) // count], session.config)


def rewrite_asserts(files: Sequence[Path], config: pytest.Config) -> None:
    """Write them where pytest looks for them. It has no public function for that, and does it itself otherwise."""
    try:
        for path in files:
            written = rewrite.get_cache_dir(path) / f"{path.stem}{rewrite.PYC_TAIL}"
            if rewrite._read_pyc(path, written) is None and rewrite.try_makedirs(written.parent):
                source, code = rewrite._rewrite_test(path, config)
                rewrite._write_pyc(config.stash[rewrite.assertstate_key], code, source, written)
    except (AttributeError, TypeError):  # another version of pytest
        return


def _is_all(config: pytest.Config) -> bool:
    return {ROOT.joinpath(one) for one in config.args} == {ROOT / "tests"}
