"""The host's classes that classes for CUDA are made after."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from dagexec.core.operator import Operator
from dagexec.core.registry import operator, operator_class, operator_module

T = TypeVar("T", bound=Operator)


def registered_kinds(base: type[Any]) -> list[type[Operator]]:
    """The classes made from `base`, itself included, that compute an operator type on the host.

    Only dagexec's own of the default engine, whatever other engines or a caller have made from them by now.
    """
    found: list[type[Operator]] = [base] if "schema" in vars(base) and _is_default(base) else []
    below = (kind for child in base.__subclasses__() for kind in registered_kinds(child))
    return list(dict.fromkeys([*found, *below]))


def _is_default(kind: type[Operator]) -> bool:
    op_type = kind.schema.type
    return operator_module(op_type).startswith("dagexec.ops.") and operator_class(op_type) is kind


def on_cuda(*kinds: type[Operator]) -> Callable[[type[T]], type[T]]:
    """Class decorator: on CUDA, the operator types of `kinds` are computed by the class, mixed with each of them."""

    def register(cls: type[T]) -> type[T]:
        for kind in kinds:
            bases = (cls,) if issubclass(cls, kind) else (cls, kind)
            members = {"__doc__": kind.__doc__, "__module__": cls.__module__}
            operator(kind.schema, device="cuda")(type(f"Cuda{kind.__name__}", bases, members))
        return cls

    return register
