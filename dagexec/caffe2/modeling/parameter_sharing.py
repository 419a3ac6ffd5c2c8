"""ParameterSharing: parameters of one name scope that stand for those of another."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from dagexec.building.scopes import Scopes
from dagexec.caffe2 import scope

__all__ = ["ParameterSharing", "shared_name"]


class _Current(threading.local):
    def __init__(self) -> None:
        self.scopes = Scopes()


_current = _Current()


@contextmanager
def ParameterSharing(shared_scopes: Mapping[str, str]) -> Iterator[None]:
    """Parameters that layers make inside in the name scopes, or under the names, of the keys are those of the values.

    `ParameterSharing({"right": "left"})` has layers in the scope `right` use the parameters of `left`. Names are
    relative to the name scope around. Raises SchemaError, where a parameter is made, for scopes that stand for each
    other.
    """
    prefix = scope.CurrentNameScope()
    with _current.scopes.parameter_sharing({prefix + own: prefix + other for own, other in shared_scopes.items()}):
        yield


def shared_name(name: str) -> str:
    """The full name of the parameter that stands for `name`, a full name, too."""
    return _current.scopes.shared(name)
