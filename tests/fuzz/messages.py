"""Changes to protobuf messages by their descriptors: any field of any part, with values from other messages.

A `Vocabulary` holds the values that each field has in the seeds, and parts of each type; so a change often gives
something that is right in itself and wrong, or surprising, where it stands.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from tests.fuzz.damage import FLOATS, STRANGE, damaged_bytes, number

_MAX_PARTS = 2000
_KEPT = 400
_FLOATS = (FieldDescriptor.TYPE_FLOAT, FieldDescriptor.TYPE_DOUBLE)


class Vocabulary:
    """Values by field and parts by type, as the messages that were added have them."""

    def __init__(self, messages: Iterable[Message]) -> None:
        self._values: dict[str, dict[Any, None]] = defaultdict(dict)
        self._parts: dict[str, dict[bytes, None]] = defaultdict(dict)
        for message in messages:
            for part in parts_of(message):
                self._add(part)

    def _add(self, part: Message) -> None:
        kept = self._parts[part.DESCRIPTOR.full_name]
        if len(kept) < _KEPT and part.ByteSize() < 2000:
            kept[part.SerializePartialToString(deterministic=True)] = None
        for field, value in part.ListFields():
            if field.type != FieldDescriptor.TYPE_MESSAGE:
                known = self._values[field.full_name]
                for one in list(value)[:8] if field.is_repeated else (value,):
                    if len(known) < _KEPT:
                        known[one] = None

    def value(self, rng: random.Random, field: FieldDescriptor) -> Any:
        """A value that the field has somewhere; None where it has none."""
        known = self._values.get(field.full_name)
        return rng.choice(list(known)) if known else None

    def fill(self, rng: random.Random, part: Message) -> None:
        """Add to `part`, which is empty, what another of its type holds."""
        known = self._parts.get(part.DESCRIPTOR.full_name)
        if known:
            part.MergeFromString(rng.choice(list(known)))


def parts_of(message: Message) -> Iterator[Message]:
    """The message and all messages inside it, the outer ones first, to a bound."""
    waiting, found = [message], 0
    while waiting and found < _MAX_PARTS:
        part = waiting.pop()
        found += 1
        yield part
        for field, value in part.ListFields():
            if field.type == FieldDescriptor.TYPE_MESSAGE:
                waiting.extend(value if field.is_repeated else (value,))


def damage_message(rng: random.Random, message: Message, vocabulary: Vocabulary) -> None:
    """Change one field of one part of `message`. A value that the field refuses leaves it as it is."""
    parts = list(parts_of(message))
    part = rng.choice([one for one in parts if one.DESCRIPTOR.fields])
    present = [field for field, _ in part.ListFields()]
    field = rng.choice(present) if present and rng.random() < 0.8 else rng.choice(list(part.DESCRIPTOR.fields))
    with suppress(ValueError, TypeError):  # out of the field's range, or not UTF-8
        if field.type == FieldDescriptor.TYPE_STRING and rng.random() < 0.6:
            _rename(rng, part, field, parts)
        elif field.is_repeated:
            _damage_repeated(rng, part, field, vocabulary)
        elif field.type == FieldDescriptor.TYPE_MESSAGE:
            _damage_part(rng, part, field, vocabulary)
        elif part in present and rng.random() < 0.15:
            part.ClearField(field.name)
        else:
            setattr(part, field.name, _value(rng, field, getattr(part, field.name), vocabulary))


def nudge_message(rng: random.Random, message: Message, vocabulary: Vocabulary) -> None:
    """Change one value of one part to one that is near, or that the field has elsewhere; the structure stays.

    What comes of it is more often taken than what `damage_message` gives, and gets further.
    """
    parts = list(parts_of(message))
    part = rng.choice(parts)
    values = [field for field, _ in part.ListFields() if field.type != FieldDescriptor.TYPE_MESSAGE]
    if not values:
        return
    field = rng.choice(values)
    with suppress(ValueError, TypeError):  # out of the field's range, or not UTF-8
        if field.type == FieldDescriptor.TYPE_STRING:
            _rename(rng, part, field, parts)
        elif field.is_repeated:
            items = getattr(part, field.name)
            place = rng.randrange(len(items))
            items[place] = _near(rng, field, items[place], vocabulary)
        else:
            setattr(part, field.name, _near(rng, field, getattr(part, field.name), vocabulary))


def _near(rng: random.Random, field: FieldDescriptor, old: Any, vocabulary: Vocabulary) -> Any:
    if rng.random() < 0.4:
        known = vocabulary.value(rng, field)
        if known is not None and not (isinstance(old, bytes) and len(known) != len(old)):
            return known
    if isinstance(old, bool):
        return not old
    if isinstance(old, int):
        return rng.choice((old + 1, old - 1, old * 2, old // 2, -old, 0, 1))
    if isinstance(old, float):
        return rng.choice((old * 2, old / 2, -old, 0.0, 1.0, rng.choice(FLOATS)))
    if isinstance(old, bytes) and old:
        place = rng.randrange(len(old))
        return old[:place] + rng.randbytes(1) + old[place + 1 :]
    return _value(rng, field, old, vocabulary)


def _rename(rng: random.Random, part: Message, field: FieldDescriptor, parts: list[Message]) -> None:
    """Put a name in place of one: of the same field in another part, so that edges lead elsewhere."""
    others = [other for other in parts if other.DESCRIPTOR is part.DESCRIPTOR and other is not part] or [part]
    fields = [one for one in part.DESCRIPTOR.fields if one.type == field.type]
    names: list[str] = []
    for other in others:
        for one in fields if rng.random() < 0.5 else [field]:
            value = getattr(other, one.name)
            names.extend(value if one.is_repeated else (value,))
    if not names:
        return
    values = getattr(part, field.name)
    if not field.is_repeated:
        setattr(part, field.name, rng.choice(names))
    elif values:
        values[rng.randrange(len(values))] = rng.choice(names)
    else:
        values.append(rng.choice(names))


def _damage_part(rng: random.Random, part: Message, field: FieldDescriptor, vocabulary: Vocabulary) -> None:
    part.ClearField(field.name)
    inner: Message = getattr(part, field.name)
    if rng.random() < 0.7:
        inner.SetInParent()
        vocabulary.fill(rng, inner)


def _damage_repeated(rng: random.Random, part: Message, field: FieldDescriptor, vocabulary: Vocabulary) -> None:
    values = getattr(part, field.name)
    count, way = len(values), rng.randrange(8)
    place, other = (rng.randrange(count), rng.randrange(count)) if count else (0, 0)
    is_message = field.type == FieldDescriptor.TYPE_MESSAGE
    if not count or way == 0:
        if is_message:
            vocabulary.fill(rng, values.add())
        else:
            values.append(_value(rng, field, field.default_value, vocabulary))
    elif way == 1:
        del values[place]
    elif way == 2:
        values.extend([values[place]] * rng.choice((1, 1, 3, 30)))
    elif way == 3:
        items = list(values)
        items[place], items[other] = items[other], items[place]
        copies = [_copy(item) for item in items] if is_message else items
        del values[:]
        values.extend(copies)
    elif way == 4:
        del values[place : place + rng.choice((1, 2, 100))]
    elif is_message:
        values[place].Clear()
        vocabulary.fill(rng, values[place])
    else:
        values[place] = _value(rng, field, values[place], vocabulary)


def _copy(message: Message) -> Message:
    copied = type(message)()
    copied.CopyFrom(message)
    return copied


def _value(rng: random.Random, field: FieldDescriptor, old: Any, vocabulary: Vocabulary) -> Any:
    if rng.random() < 0.5:
        known = vocabulary.value(rng, field)
        if known is not None:
            return known
    if isinstance(old, bool):
        return not old
    if field.type == FieldDescriptor.TYPE_ENUM:
        return rng.randrange(30)
    if isinstance(old, int):
        return number(rng, old)
    if field.type in _FLOATS:
        return rng.choice(FLOATS)
    if isinstance(old, bytes):
        return damaged_bytes(rng, old)
    return rng.choice((*STRANGE, str(old) + "_", str(old)[:-1]))
