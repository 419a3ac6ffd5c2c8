"""The host's classes that classes for CUDA are made after."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from dagexec.core.operator import Operator
from dagexec.core.registry import operator

T = TypeVar("T", bound=Operator)


def registered_kinds(base: type[Any]) -> list[type[Operator]]:
    """The classes made from `base`, itself included, that compute an operator type."""
    found: list[type[Operator]] = [base] if "schema" in vars(base) else []
    return found + [kind for child in base.__subclasses__() for kind in registered_kinds(child)]


def on_cuda(*kinds: type[Operator]) -> Callable[[type[T]], type[T]]:
    """Class decorator: on CUDA, the operator types of `kinds` are computed by the class, mixed with each of them."""

    def register(cls: type[T]) -> type[T]:
        for kind in kinds:
            bases = (cls,) if issubclass(cls, kind) else (cls, kind)
            members = {"__doc__": kind.__doc__, "__module__": cls.__module__}
            operator(kind.schema, device="cuda")(type(f"Cuda{kind.__name__}", bases, members))
        return cls

    return register
