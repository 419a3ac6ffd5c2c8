"""Scopes of a model builder: what `with` blocks say of names, devices, arguments and parameters of the layers inside.

All of them nest, and the innermost wins.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import field
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from dagexec.core.device import Device
from dagexec.errors import SchemaError
from dagexec.platform.records import dataclass

SEPARATOR = "/"

_layer_arguments: dict[str, frozenset[str]] = {}


@dataclass
class Scopes:
    """The scopes that are open.

    Attributes:
        prefixes: of names, each with those before it: `a/`, `a/b/`.
        devices: the innermost last.
        defaults: (layer, argument) to values, the innermost last.
        sharing: from parameter scopes, or parameters, to those used in their place; the innermost last.
    """

    prefixes: list[str] = field(default_factory=list)
    devices: list[Device] = field(default_factory=list)
    defaults: list[Mapping[tuple[str, str], Any]] = field(default_factory=list)
    sharing: list[Mapping[str, str]] = field(default_factory=list)

    @property
    def prefix(self) -> str:
        """What new names begin with."""
        return self.prefixes[-1] if self.prefixes else ""

    @property
    def device(self) -> Device | None:
        """The device of new operators; None leaves it open."""
        return self.devices[-1] if self.devices else None

    def scoped(self, name: str) -> str:
        """The full name of a new blob; one that begins with the prefix is full already."""
        return name if name.startswith(self.prefix) else self.prefix + name

    def candidates(self, name: str) -> Iterator[str]:
        """The full names that `name` may stand for, from the innermost scope outwards."""
        for prefix in reversed(self.prefixes):
            yield prefix + name
        yield name

    def shared(self, parameter: str) -> str:
        """The parameter to use instead of `parameter`, a full name; it itself when it is not shared.

        What it stands for may stand for another one in turn. In one mapping the longest name that fits counts.
        Raises SchemaError for parameters that stand for each other.
        """
        passed = [parameter]
        for mapping in reversed(self.sharing):
            left = {source: target for source, target in mapping.items() if source != target}
            while fits := [name for name in left if f"{passed[-1]}/".startswith(name + SEPARATOR)]:
                source = max(fits, key=len)
                found = left.pop(source) + passed[-1][len(source) :]
                if found in passed:
                    raise SchemaError(f"parameter_sharing: {' -> '.join([*passed, found])} is a cycle")
                passed.append(found)
        return passed[-1]

    def layer_defaults(self, layer: str) -> dict[str, Any]:
        """Argument values for calls of `layer`."""
        merged: dict[str, Any] = {}
        for scope in self.defaults:
            merged.update({argument: value for (name, argument), value in scope.items() if name == layer})
        return merged

    @contextmanager
    def name_scope(self, prefix: str) -> Iterator[None]:
        """New names begin with `prefix/`. Raises SchemaError for an empty prefix."""
        cleaned = prefix.strip(SEPARATOR)
        if not cleaned:
            raise SchemaError(f"a name scope needs a name, found {prefix!r}")
        with _pushed(self.prefixes, f"{self.prefix}{cleaned}{SEPARATOR}"):
            yield

    @contextmanager
    def device_scope(self, device: str | Device) -> Iterator[None]:
        """New operators run on `device`. Raises DeviceError for an unknown kind."""
        with _pushed(self.devices, Device.parse(device) if isinstance(device, str) else device):
            yield

    @contextmanager
    def arg_scope(self, *layers: str, **defaults: Any) -> Iterator[None]:
        """Calls of `layers` that do not give these arguments get them from here.

        Raises SchemaError for a layer, or an argument of one, that does not exist.
        """
        for layer_name in layers:
            known = _layer_arguments.get(layer_name)
            if known is None:
                raise SchemaError(f"arg_scope: unknown layer {layer_name!r}; layers: {sorted(_layer_arguments)}")
            unknown = sorted(defaults.keys() - known)
            if unknown:
                raise SchemaError(f"arg_scope: {layer_name} has no arguments {unknown}; it has {sorted(known)}")
        scope = {(name, argument): value for name in layers for argument, value in defaults.items()}
        with _pushed(self.defaults, scope):
            yield

    @contextmanager
    def parameter_sharing(self, mapping: Mapping[str, str]) -> Iterator[None]:
        """Parameters of a name scope, or single ones, stand for others: `{"right": "left"}`, `{"b_w": "a_w"}`.

        Names are relative to the name scope around. Blocks inside each other are followed from the innermost outwards.
        """
        absolute = {
            self.scoped(source.rstrip(SEPARATOR)): self.scoped(target.rstrip(SEPARATOR))
            for source, target in mapping.items()
        }
        with _pushed(self.sharing, absolute):
            yield


class Scoped(Protocol):
    """What has scopes."""

    @property
    def scopes(self) -> Scopes:
        """The scopes that are open."""


Owner = TypeVar("Owner", bound=Scoped)
P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


def layer(method: Callable[Concatenate[Owner, P], R]) -> Callable[Concatenate[Owner, P], R]:
    """Decorator of a layer method: arguments that a call leaves out are taken from `arg_scope` blocks around it."""
    signature = inspect.signature(method)
    _layer_arguments[method.__name__] = frozenset(signature.parameters) - {"self"}

    @functools.wraps(method)
    def call(owner: Owner, /, *args: P.args, **kwargs: P.kwargs) -> R:
        defaults = owner.scopes.layer_defaults(method.__name__)
        if defaults:
            given = signature.bind_partial(owner, *args, **kwargs).arguments
            kwargs.update({name: value for name, value in defaults.items() if name not in given})
        return method(owner, *args, **kwargs)

    return call


@contextmanager
def _pushed(stack: list[T], item: T) -> Iterator[None]:
    stack.append(item)
    try:
        yield
    finally:
        stack.pop()
