"""Forms: what operators have in common that differ in no more than the names of their blobs. Layers of a net repeat."""

from __future__ import annotations

import weakref
from collections.abc import Hashable

from dagexec.core.node import Node


class Form:
    """One object for all operators of a form, to be compared by identity."""

    __slots__ = ("__weakref__", "_key")

    def __init__(self, key: Hashable) -> None:
        self._key = key


_forms: weakref.WeakValueDictionary[Hashable, Form] = weakref.WeakValueDictionary()


def form_of(kind: type, definition: Node) -> Form:
    """The form of operators of class `kind` with this definition: arguments, and which blobs are the same."""
    first: dict[str, int] = {}
    places = tuple([first.setdefault(name, len(first)) for name in (*definition.input, *definition.output)])
    key = kind, definition.values.key, len(definition.input), places
    found = _forms.get(key)
    return _forms.setdefault(key, Form(key)) if found is None else found
