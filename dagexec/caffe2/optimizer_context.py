"""UseOptimizer: parameters that layers make inside are updated by an optimizer of their own.

    with UseOptimizer({"WEIGHT": SgdOptimizer(0.1), "BIAS": SgdOptimizer(0.2)}):
        brew.fc(model, "x", "y", 4, 3)

The keys are `ParameterTags`, or DEFAULT_OPTIM for all parameters that no other key is for; an optimizer without a key
is for these, too. What has no optimizer of its own is updated by that of the model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextvars import ContextVar, Token
from types import MappingProxyType
from typing import Any

__all__ = ["DEFAULT_OPTIM", "UseOptimizer", "optimizer_of"]

DEFAULT_OPTIM = "DEFAULT"

_NOTHING: Mapping[str, Any] = MappingProxyType({})
_open: ContextVar[Mapping[str, Any]] = ContextVar("optimizers", default=_NOTHING)


class UseOptimizer:
    """A context of optimizers; keys that it does not have are those of the context around."""

    def __init__(self, *optim_dicts: Any) -> None:
        """Optimizers, or mappings from tags to them. Raises ValueError where a key is there twice."""
        self._optimizers: dict[str, Any] = {}
        for given in optim_dicts:
            named = given if isinstance(given, Mapping) else {DEFAULT_OPTIM: given}
            if twice := sorted(self._optimizers.keys() & named.keys()):
                raise ValueError(f"UseOptimizer: there are two optimizers for {twice}")
            self._optimizers.update(named)
        self._tokens: list[Token[Mapping[str, Any]]] = []

    def __enter__(self) -> UseOptimizer:
        self._tokens.append(_open.set({**_open.get(), **self._optimizers}))
        return self

    def __exit__(self, *_error: object) -> None:
        _open.reset(self._tokens.pop())


def optimizer_of(tags: Iterable[str]) -> Any:
    """What updates a parameter with these tags that is made here; None for the optimizer of its model."""
    optimizers = _open.get()
    return next((optimizers[tag] for tag in sorted(tags) if tag in optimizers), optimizers.get(DEFAULT_OPTIM))
