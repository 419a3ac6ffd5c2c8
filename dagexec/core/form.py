"""Forms: operators of equal type and arguments that differ only in blob names have one. Layers of a net repeat."""

from __future__ import annotations

import weakref
from collections.abc import Hashable


class Form:
    """The shared object of all operators of a form, compared by identity.

    Attributes:
        verified: the schema that operators of this form fit, once that is known.
    """

    __slots__ = ("__weakref__", "_key", "_of_classes", "verified")

    def __init__(self, key: Hashable) -> None:
        self._key = key
        self.verified: object = None
        self._of_classes: dict[type, Form] = {}

    def of_class(self, kind: type) -> Form:
        """The form of operators of this form that class `kind` computes."""
        form = self._of_classes.get(kind)
        return self._of_classes.setdefault(kind, Form((kind, self._key))) if form is None else form


_forms: weakref.WeakValueDictionary[Hashable, Form] = weakref.WeakValueDictionary()


def form_of(key: Hashable) -> Form:
    """The form of operators with this `key`; it lives as long as it is in use."""
    form = _forms.get(key)
    return _forms.setdefault(key, Form(key)) if form is None else form
