"""What a learning-rate policy is, and how the arguments of an operator say one; `policies` has them all.

A policy is a frozen dataclass whose fields are the arguments of operator LearningRate of the same names.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import MISSING, fields
from typing import ClassVar, TypeVar, dataclass_transform

from dagexec.core.arguments import Arguments, ArgumentValue
from dagexec.errors import ArgumentError
from dagexec.platform.records import dataclass


@dataclass(frozen=True)
class Policy(ABC):
    """Base of the policies.

    Attributes:
        name: the value of argument `policy`.
    """

    name: ClassVar[str]

    @abstractmethod
    def multiplier(self, iteration: int, base_lr: float) -> float:
        """What `base_lr` is multiplied by at `iteration`, which is at least 0."""

    def arguments(self, prefix: str = "") -> dict[str, ArgumentValue]:
        """The arguments of operator LearningRate that say this policy, each name with `prefix` before it."""
        own = {f"{prefix}{part.name}": getattr(self, part.name) for part in fields(self)}
        return {f"{prefix}policy": self.name, **own}

    @classmethod
    def read(cls, arguments: Arguments, label: str, prefix: str) -> Policy:
        """The policy that the arguments say. Raises ArgumentError."""
        values = {}
        for part in fields(cls):
            argument = f"{prefix}{part.name}"
            if argument not in arguments and part.default is MISSING:
                raise ArgumentError(f"{label}: policy {cls.name!r} needs argument {argument!r}")
            if argument in arguments:
                values[part.name] = _READERS[str(part.type)](arguments, argument)
        return cls(**values)

    def require(self, holds: bool, what: str) -> None:
        """Raise ArgumentError, with the fields, unless `holds`; `what` says what must."""
        if not holds:
            found = ", ".join(f"{part.name}={getattr(self, part.name)!r}" for part in fields(self))
            raise ArgumentError(f"learning-rate policy {self.name!r}: {what}; found {found}")


_READERS: dict[str, Callable[[Arguments, str], int | float | bool]] = {
    "int": lambda arguments, name: arguments.int(name, 0),
    "float": lambda arguments, name: arguments.float(name, 0.0),
    "bool": lambda arguments, name: arguments.bool(name),
}

_policies: dict[str, type[Policy]] = {}
PolicyClass = TypeVar("PolicyClass", bound=type[Policy])


@dataclass_transform(frozen_default=True)
def policy(name: str) -> Callable[[PolicyClass], PolicyClass]:
    """Make a class a frozen dataclass, and the policy called `name`."""

    def register(cls: PolicyClass) -> PolicyClass:
        cls.name = name
        dataclass(frozen=True)(cls)
        _policies[name] = cls
        return cls

    return register


def policy_names() -> list[str]:
    """The names of all policies, sorted."""
    return sorted(_policies)


def read_policy(arguments: Arguments, label: str, prefix: str = "") -> Policy:
    """The policy that the arguments of an operator say, those whose names begin with `prefix`.

    Raises ArgumentError, with `label`, for an unknown policy, a missing argument and a value that makes no sense.
    """
    name = arguments.string(f"{prefix}policy", "")
    if name not in _policies:
        raise ArgumentError(
            f"{label}: argument '{prefix}policy' must be one of {', '.join(policy_names())}; found {name!r}"
        )
    try:
        return _policies[name].read(arguments, label, prefix)
    except ArgumentError as error:
        problem = str(error)
        raise ArgumentError(problem if problem.startswith(label) else f"{label}: {problem}") from None
