"""What a planted bug is, and how it is put into the code and taken out again."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Literal

Finder = Literal["machine", "proof", "detector", "schedules"]
"""What finds a bug: the search of all states of a machine, the static proof, the detector in one run, or schedules that
the portfolio samples."""


@dataclass(frozen=True)
class Edit:
    """In the source of `function`, `before`, which stands there once, becomes `after`."""

    function: Callable[..., object]
    before: str
    after: str


@dataclass(frozen=True)
class Bug:
    """One mistake in synchronization.

    Attributes:
        name: short, in words.
        family: what kind it is.
        broken: what is wrong.
        edits: the mistake itself.
        scene: the smallest thing in which it can show. Raises where it does; with `found_by` "schedules", under some.
        found_by: the tool that finds it there.
        says: part of what is raised then.
        modeled_on: the published report of another executor that is the pattern of it: repository, number, what was
            wrong.
        timeouts: deadlines may pass at any decision point.
        slow: to find it takes more than 0.4 s.
    """

    name: str
    family: str
    broken: str
    edits: tuple[Edit, ...]
    scene: Callable[[], object]
    found_by: Finder
    says: str
    modeled_on: str = ""
    timeouts: bool = False
    slow: bool = False


class EditError(Exception):
    """An edit that does not fit the code, which has changed since."""


@contextmanager
def planted(bug: Bug) -> Iterator[None]:
    """While it lasts, the code has the bug. Raises EditError when that does not fit."""
    try:
        with edited(bug.edits):
            yield
    except EditError as error:
        raise EditError(f"{bug.name}: {error}") from None


@contextmanager
def edited(edits: Iterable[Edit]) -> Iterator[None]:
    """While it lasts, the code is edited. Raises EditError when that does not fit."""
    sources: dict[FunctionType, str] = {}
    for edit in edits:
        function = inspect.unwrap(edit.function)
        assert isinstance(function, FunctionType)
        source = sources.get(function) or inspect.getsource(function)
        if source.count(edit.before) != 1 or edit.before == edit.after:
            raise EditError(f"{function.__qualname__} has its text {source.count(edit.before)} times")
        sources[function] = source.replace(edit.before, edit.after)
    with ExitStack() as stack:
        for function, source in sources.items():
            stack.callback(setattr, function, "__code__", function.__code__)
            function.__code__ = _compiled(function, source)
        yield


def _compiled(function: FunctionType, source: str) -> CodeType:
    """The code of a function of this source; whoever has the function, under whatever name, calls that."""
    first = function.__code__.co_firstlineno
    text = "from __future__ import annotations\n" + "\n" * (first - 2) + textwrap.dedent(source)
    names: dict[str, object] = {}
    exec(compile(text, function.__code__.co_filename, "exec"), function.__globals__, names)
    made = names[function.__name__]
    made = made.fget if isinstance(made, property) else made
    assert callable(made)
    plain = inspect.unwrap(made)
    assert isinstance(plain, FunctionType)
    return plain.__code__
