"""Which operators computed an array: bytes of two engines are never compared, as their sums round in other orders.

Whether they happen to be equal depends on the processor. While tests run, what executors and workspaces return are
arrays that know the operators of their nets, and to compare the bytes of two that differ in their engines is an error.
A test compares such arrays with numbers in float64, or runs both on one engine (`optimize=False` gives the host that
of the simulated device). The tests of single operators, tests/ops, are left out: they say where engines promise to give
the same.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import pytest

from dagexec.core.operator import Operator
from dagexec.core.schema import OpSchema
from dagexec.core.workspace import Workspace
from dagexec.executor.executor import Executor
from dagexec.scheduler.nets.net import BaseNet
from dagexec.training.data_parallel.parallel_model import ParallelModel

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Engines:
    """What computed a result.

    Attributes:
        libraries: the packages of engines that are not NumPy's: `dagexec.ops.engines.onednn` and
        `dagexec.ops.engines.cuda`. classes: operator types, the class that computed each, and whether it did so row by
        row.
    """

    libraries: frozenset[str]
    classes: frozenset[tuple[str, type[Operator], bool]]

    def of(self, operators: Collection[str]) -> set[str]:
        """Those of `operators`, for messages."""
        return {
            f"{kind} by {one.__module__}.{one.__qualname__}{'' if by_rows else ' on whole batches'}"
            for kind, one, by_rows in self.classes
            if kind in operators
        }


class TwoEnginesError(AssertionError):
    """A test compared the bytes of two engines."""


class Computed(np.ndarray[Any, Any]):
    """An array that knows which engines computed it; so do views of it, and what NumPy computes from it."""

    engines: Engines | None

    def __array_finalize__(self, array: Array | None) -> None:
        """Take over what `array` knows."""
        self.engines = getattr(array, "engines", None)

    def __reduce__(self) -> Any:
        """As a plain array: another process need not know this module."""
        return self.view(np.ndarray).__reduce__()

    def tobytes(self, order: Any = "C") -> bytes:
        """The bytes, which know the engines, too; integers are exact on all."""
        found = super().tobytes(order)
        return ComputedBytes(found, self.engines) if self.engines is not None and _rounds(self) else found


class ComputedBytes(bytes):
    """Bytes of results; to compare them with those of other engines is an error, however it ends."""

    engines: Engines

    def __new__(cls, content: bytes, engines: Engines) -> ComputedBytes:
        """`content`, computed by `engines`."""
        made = super().__new__(cls, content)
        made.engines = engines
        return made

    __hash__ = bytes.__hash__

    def __eq__(self, other: object) -> bool:
        check_one_engine(self, other)
        return super().__eq__(other)

    def __ne__(self, other: object) -> bool:
        check_one_engine(self, other)
        return super().__ne__(other)

    def __reduce__(self) -> Any:
        """As plain bytes."""
        return bytes, (bytes(self),)


def check_one_engine(one: object, other: object) -> None:
    """Raise TwoEnginesError if both know which engines computed them, and these differ.

    Operators that only one of the nets has may be others fused, or those of another schedule.
    """
    first, second = getattr(one, "engines", None), getattr(other, "engines", None)
    if first is None or second is None or allowed[0]:
        return
    both = {operator for operator, *_ in first.classes} & {operator for operator, *_ in second.classes}
    here, there = first.of(both) | first.libraries, second.of(both) | second.libraries
    if here != there:
        raise TwoEnginesError(
            f"bytes of two engines are compared (see tests/engines.py): {_listed(here - there)}, "
            f"and {_listed(there - here)}"
        )


def _listed(names: Collection[str]) -> str:
    return ", ".join(sorted(names)) or "NumPy's alone"


allowed = [False]
"""Whether the test that runs may compare bytes of any engines: all it computes is exact."""

_nets: WeakKeyDictionary[Workspace, list[Engines]] = WeakKeyDictionary()  # that were made in each workspace


def engines_of(net: BaseNet) -> Engines:
    """The engines of a net's operators, and of those in their bodies, but for what only moves elements."""
    classes = {
        (operator.schema.type, type(operator), operator.is_batch_invariant)
        for operator in _operators(net)
        if _computes(operator.schema)
    }
    packages = {".".join(base.__module__.split(".")[:4]) for _, cls, _ in classes for base in cls.__mro__}
    return Engines(frozenset(packages & {"dagexec.ops.engines.onednn", "dagexec.ops.engines.cuda"}), frozenset(classes))


def _operators(net: BaseNet) -> Iterator[Operator]:
    for operator in net.operators:
        yield operator
        for body in operator.bodies.values():
            if isinstance(body, BaseNet):
                yield from _operators(body)


def _computes(schema: OpSchema) -> bool:
    return not (schema.view or schema.moves_elements or schema.crossing or schema.sub_nets or schema.foreign)


def _in_workspace(workspace: Workspace) -> Engines | None:
    """The engines of all nets that were made in a workspace."""
    nets = _nets.get(workspace)
    if not nets:
        return None
    return Engines(
        frozenset().union(*(one.libraries for one in nets)), frozenset().union(*(one.classes for one in nets))
    )


def _rounds(value: Any) -> bool:
    """True for an array of numbers that are no integers; bfloat16 is of kind V."""
    return isinstance(value, np.ndarray) and value.dtype.kind in "fcV"


def _knowing(value: Any, engines: Engines | None) -> Any:
    """A result that knows its engines: an array, or a list of such."""
    if isinstance(value, list):
        return [_knowing(item, engines) for item in value]
    if type(value) is not np.ndarray or not _rounds(value):
        return value
    found = value.view(Computed)
    found.engines = engines
    return found


@contextmanager
def engines_known() -> Iterator[None]:
    """Within it, what executors and workspaces return knows its engines."""
    with pytest.MonkeyPatch.context() as patch:
        _patch(patch, BaseNet, "__init__", _noting)
        _patch(patch, Executor, "run", _run)
        _patch(patch, Executor, "run_async", _run_async)
        _patch(patch, Workspace, "fetch_blob", _fetch_blob)
        _patch(patch, ParallelModel, "_fetched", _fetched)
        _patch(patch, np, "array_equal", _comparing)
        _patch(patch, np.testing, "assert_array_equal", _comparing)
        yield


@contextmanager
def engines_unknown() -> Iterator[None]:
    """Within it, executors are called as they are, and return plain arrays."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("run", "run_async"):
            patch.setattr(Executor, name, getattr(Executor, name).__wrapped__)
        yield


def _patch(patch: pytest.MonkeyPatch, owner: Any, name: str, changed: Callable[..., Any]) -> None:
    before = getattr(owner, name)
    patch.setattr(owner, name, functools.wraps(before)(changed(before)))


def _noting(before: Callable[..., None]) -> Callable[..., None]:
    def init(self: BaseNet, *given: Any, **named: Any) -> None:
        before(self, *given, **named)
        workspace: Workspace | None = self.workspace
        while workspace is not None:  # a net may write blobs of those above its own
            _nets.setdefault(workspace, []).append(engines_of(self))
            workspace = workspace.parent

    return init


def _run(before: Callable[..., Any]) -> Callable[..., Any]:
    def run(self: Executor, feeds: Any, **named: Any) -> Any:
        return _known_results(self, before(self, feeds, **named), named)

    return run


def _run_async(before: Callable[..., Any]) -> Callable[..., Any]:
    async def run_async(self: Executor, feeds: Any, **named: Any) -> Any:
        return _known_results(self, await before(self, feeds, **named), named)

    return run_async


def _known_results(executor: Executor, results: Mapping[str, Any], named: Mapping[str, Any]) -> Mapping[str, Any]:
    """Results that know their engines; arrays of the caller stay what they are, but for engines that they know."""
    engines, out = engines_of(executor.net()), named.get("out") or {}
    for array in out.values():
        if isinstance(array, Computed):  # made like a result of others
            array.engines = engines
    return {name: value if name in out else _knowing(value, engines) for name, value in results.items()}


def _fetch_blob(before: Callable[..., Any]) -> Callable[..., Any]:
    def fetch_blob(self: Workspace, name: str) -> Any:
        return _knowing(before(self, name), _in_workspace(self))

    return fetch_blob


def _fetched(before: Callable[..., Any]) -> Callable[..., Any]:
    def fetched(self: ParallelModel, names: Any) -> Any:
        engines = _in_workspace(self.workspace_of(self.places[0]))
        return {name: _knowing(value, engines) for name, value in before(self, names).items()}

    return fetched


def _comparing(before: Callable[..., Any]) -> Callable[..., Any]:
    def compare(one: Any, other: Any, *given: Any, **named: Any) -> Any:
        if _rounds(one) and _rounds(other):
            check_one_engine(one, other)
        return before(one, other, *given, **named)

    return compare
