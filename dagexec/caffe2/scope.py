"""Scopes of names and devices, by thread: what `with NameScope("a"):` says of the operators that are made inside."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from dagexec.core.proto import DeviceOption

__all__ = ["CurrentDeviceScope", "CurrentNameScope", "DeviceScope", "EmptyDeviceScope", "NameScope"]

_NAMESCOPE_SEPARATOR = "/"  # scripts read it


class _Current(threading.local):
    prefix = ""
    device: DeviceOption | None = None


_current = _Current()


def CurrentNameScope() -> str:
    """What new names begin with: empty, or `a/b/`."""
    return _current.prefix


def CurrentDeviceScope() -> DeviceOption | None:
    """The device of new operators, or None."""
    return _current.device


@contextmanager
def NameScope(prefix: str, reset: bool = False) -> Iterator[str]:
    """Names of blobs made inside begin with `prefix/`, behind that of the scope around unless `reset`."""
    before = _current.prefix
    begin = "" if reset else before
    _current.prefix = f"{begin}{prefix}{_NAMESCOPE_SEPARATOR}" if prefix else begin
    try:
        yield _current.prefix
    finally:
        _current.prefix = before


@contextmanager
def DeviceScope(scope: DeviceOption | None, node_name: str | None = None) -> Iterator[None]:
    """Operators made inside run on the device `scope`, which may leave the node to the scope around."""
    made = DeviceOption()
    if scope is not None:
        made.CopyFrom(scope)
    if node_name:
        made.node_name = node_name
    before = _current.device
    if before is not None and before.node_name and not made.node_name:
        made.node_name = before.node_name
    _current.device = made
    try:
        yield
    finally:
        _current.device = before


@contextmanager
def EmptyDeviceScope() -> Iterator[None]:
    """Operators made inside have no device of their own, whatever the scopes around say."""
    before, _current.device = _current.device, None
    try:
        yield
    finally:
        _current.device = before
