"""Forms: what operators have in common that differ in no more than the names of their blobs. Layers of a net repeat."""

from __future__ import annotations

import weakref
from collections.abc import Hashable


class Form:
    """One object for all operators of a form, to be compared by identity.

    Attributes:
        verified: the schema that operators of this form fit, once that is known.
    """

    __slots__ = ("__weakref__", "_key", "_of_classes", "verified")

    def __init__(self, key: Hashable) -> None:
        self._key = key
        self.verified: object = None
        self._of_classes: dict[type, Form] = {}

    def of_class(self, kind: type) -> Form:
        """That of operators of this form which are computed by class `kind`."""
        found = self._of_classes.get(kind)
        return self._of_classes.setdefault(kind, Form((kind, self._key))) if found is None else found


_forms: weakref.WeakValueDictionary[Hashable, Form] = weakref.WeakValueDictionary()


def form_of(key: Hashable) -> Form:
    """The form of operators for which `key` is the same; as long as somebody has it."""
    found = _forms.get(key)
    return _forms.setdefault(key, Form(key)) if found is None else found
