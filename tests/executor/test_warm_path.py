"""How much code a warm run passes through, beside what operators do: it is what a small net's time is made of."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType

import pytest

import dagexec
from dagexec.executor.warm_up import zero_feeds

_PACKAGE = Path(dagexec.__file__).parent
# Operators, and locks, which are functions of ours only from Python 3.14 on: `platform/locks.py` says why.
_LEFT_OUT = (str(_PACKAGE / "ops"), str(_PACKAGE / "core" / "operator.py"), str(_PACKAGE / "platform" / "locks.py"))


class Passed:
    """The functions of dagexec, operators and locks left out, that begin in the calling thread while it listens.

    What workers pass through depends on when they come.
    """

    def __init__(self) -> None:
        self.functions: set[CodeType] = set()
        self._listens = False

    def __call__(self, frame: FrameType, event: str, _argument: object) -> None:
        path = frame.f_code.co_filename
        if self._listens and event == "call" and path.startswith(str(_PACKAGE)) and not path.startswith(_LEFT_OUT):
            self.functions.add(frame.f_code)

    @contextmanager
    def listening(self) -> Iterator[None]:
        self._listens = True
        sys.setprofile(self)
        try:
            yield
        finally:
            sys.setprofile(None)
            self._listens = False

    @property
    def files(self) -> set[str]:
        return {function.co_filename for function in self.functions}


@pytest.mark.usefixtures("plain_results")
@pytest.mark.parametrize(
    ("model", "net_type", "files", "functions"),
    [("zoo:lenet", "simple", 10, 16), pytest.param("zoo:squeezenet", "dag", 20, 76, marks=pytest.mark.slow)],
    ids=["inline", "pooled"],
)
def test_a_warm_run_passes_few_files_and_functions(model: str, net_type: str, files: int, functions: int) -> None:
    passed = Passed()
    with dagexec.compile(model, optimize=False, net_type=net_type, num_workers=2) as executor:
        feeds = zero_feeds(executor.model)
        for _ in range(3):
            executor.run(feeds)
        with passed.listening():
            executor.run(feeds)
    print(f"{model}: {len(passed.files)} files, {len(passed.functions)} functions")
    assert len(passed.files) <= files, sorted(passed.files)
    assert len(passed.functions) <= functions, sorted(function.co_qualname for function in passed.functions)
