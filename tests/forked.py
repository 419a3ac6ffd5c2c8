"""What a child made by `os.fork` does, for tests: it ends whatever happens, and its parent is told."""

from __future__ import annotations

import faulthandler
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

_ALONE = "DAGEXEC_TEST_ALONE"


def passed_alone(test: pytest.FixtureRequest) -> bool:
    """Run `test` in a process whose memory nothing has used before, and return True; False in that process itself."""
    if os.environ.get(_ALONE):
        return False
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", test.node.nodeid]
    found = subprocess.run(
        command, env=os.environ | {_ALONE: "1"}, cwd=test.config.rootpath, capture_output=True, text=True
    )
    assert found.returncode == 0, found.stdout + found.stderr
    return True


PATIENCE = 30  # seconds until a child that hangs is killed


def in_child(body: Callable[[], Any]) -> Any:
    """What `body` returns in a child, or the text of what it raises there. Raises AssertionError when it hangs."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(PATIENCE)
        try:
            try:
                found = body()
            except BaseException as error:
                found = f"{type(error).__name__}: {error}"
            os.write(writing, pickle.dumps(found))
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        text = pipe.read()
    assert os.waitpid(child, 0)[1] == 0, "the child hung, or died"
    return pickle.loads(text)


def end_of(body: Callable[[], object]) -> int:
    """How a child ends that calls `body`: with 0, with 1 for an error, or by minus the signal."""
    child = os.fork()
    if not child:
        faulthandler.disable()
        signal.alarm(PATIENCE)
        try:
            body()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
