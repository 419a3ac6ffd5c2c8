"""Changes to bytes, JSON and zip archives, drawn from a generator: what bit rot, truncation and malice do to files."""

from __future__ import annotations

import io
import json
import random
import struct
import warnings
import zipfile
from typing import Any

NUMBERS = (
    0, 1, -1, 2, 3, 4, 5, 7, 8, 15, 16, 31, 64, 100, 127, 128, 255, 256, 1000, 32767, 65535, 65536, 10**6,
    2**31 - 1, 2**31, -(2**31), 2**32, 2**40, 2**62, 2**63 - 1, -(2**63),
)  # fmt: skip
FLOATS = (0.0, -0.0, 1.0, -1.0, 0.5, 1e-45, -1e-45, 1e38, -3.4e38, float("nan"), float("inf"), -float("inf"), 1e300)
STRANGE = ("", " ", "\0", "x" * 300, "../outside", "a/b", "\u00e9\u4e16", "%s", "-1", "None", "0", "{}")


def number(rng: random.Random, old: int) -> int:
    """An integer in place of `old`: near it, extreme, or small."""
    way = rng.randrange(4)
    if way == 0:
        return old + rng.choice((-2, -1, 1, 2))
    if way == 1:
        return old * rng.choice((-1, 2, 3, 1000))
    return rng.choice(NUMBERS) if way == 2 else rng.randrange(12)


def damaged_bytes(rng: random.Random, content: bytes, other: bytes = b"") -> bytes:
    """`content` with one change; `other` is what a splice takes bytes from."""
    data = bytearray(content)
    place = rng.randrange(len(data) + 1)
    length = min(rng.choice((1, 1, 2, 4, 8, 16, 64)), len(data) - place)
    way = rng.randrange(8)
    if way == 0 and place < len(data):
        data[place] ^= 1 << rng.randrange(8)
    elif way == 1:
        data[place : place + length] = rng.randbytes(length)
    elif way == 2:
        del data[place : place + length]
    elif way == 3:
        data[place:place] = data[place : place + length] * rng.choice((1, 2, 50))
    elif way == 4:
        del data[place:]
    elif way == 5:
        packed = struct.pack(rng.choice("<>") + "q", max(-(2**63), min(2**63 - 1, rng.choice(NUMBERS))))
        size = rng.choice((1, 2, 4, 8))
        data[place : place + size] = packed[:size]
    elif way == 6 and other:
        start = rng.randrange(len(other))
        data[place:] = other[start : start + rng.randrange(1, 4096)]
    else:
        data[place:place] = rng.randbytes(rng.choice((1, 2, 8)))
    return bytes(data)


def damaged_json(rng: random.Random, value: Any) -> Any:
    """A JSON value with one change somewhere in it."""
    if isinstance(value, dict) and value and rng.random() < 0.85:
        inner = [name for name, part in value.items() if part and isinstance(part, dict | list)]
        key = rng.choice(inner if inner and rng.random() < 0.7 else list(value))
        way = rng.randrange(10)
        if way == 0:
            return {name: part for name, part in value.items() if name != key}
        if way == 1:
            return value | {rng.choice(STRANGE): value[key]}
        return value | {key: damaged_json(rng, value[key])}
    if isinstance(value, list) and value and rng.random() < 0.85:
        place = rng.randrange(len(value))
        way = rng.randrange(6)
        if way == 0:
            return value[:place] + value[place + 1 :]
        if way == 1:
            return [*value, value[place]] * rng.choice((1, 2, 20))
        return [*value[:place], damaged_json(rng, value[place]), *value[place + 1 :]]
    if isinstance(value, int) and not isinstance(value, bool) and rng.random() < 0.7:
        return number(rng, value)
    if isinstance(value, str) and value and rng.random() < 0.5:
        place = rng.randrange(len(value))
        return value[:place] + rng.choice(("", "x", "9", "-", ":", " | ")) + value[place + rng.randrange(2) :]
    return rng.choice((None, True, 0, -1, 2**63, 10**30, 1.5, float("nan"), [], {}, [[]], *STRANGE))


def damaged_json_bytes(rng: random.Random, content: bytes) -> bytes:
    """JSON with one change; content that is no JSON any more gets a change of its bytes."""
    try:
        return json.dumps(damaged_json(rng, json.loads(content))).encode()
    except (ValueError, RecursionError):
        return damaged_bytes(rng, content)


def damaged_zip(rng: random.Random, content: bytes) -> bytes:
    """A zip archive in which one member has changed, is missing, occurs twice or is packed otherwise."""
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            members = [(info.filename, archive.read(info)) for info in archive.infolist()]
    except Exception:  # of an archive that is damaged already, zipfile and zlib say so in many ways
        return damaged_bytes(rng, content)
    if not members:
        return damaged_bytes(rng, content)
    place = rng.randrange(len(members))
    name, data = members[place]
    way = rng.randrange(6)
    if way == 0:
        del members[place]
    elif way == 1:
        members.append(members[place])
    elif way == 2:
        members[place] = rng.choice((*STRANGE[1:], "x.npy", name.removesuffix(".npy"))), data
    else:
        members[place] = name, damaged_array(rng, data)
    packed = io.BytesIO()
    kind = rng.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))
    with zipfile.ZipFile(packed, "w", kind) as archive, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a name that occurs twice
        for name, data in members:
            with archive.open(zipfile.ZipInfo(name), "w") as member:
                member.write(data)
    return packed.getvalue()


def damaged_array(rng: random.Random, content: bytes) -> bytes:
    """A .npy file whose header tells another type, order or shape, or with any other change."""
    end = content.find(b"\n")
    if end < 0 or rng.random() < 0.3:
        return damaged_bytes(rng, content)
    header, data = content[:end], content[end:]
    changes = (
        (b"<f4", rng.choice((b"<f8", b">f4", b"|O", b"<U9", b"|V4", b"<M8[s]", b"|b1", b"<c16", b"|S0", b"<i4"))),
        (b"False", b"True "),
        (b"(", b"(" + str(rng.choice(NUMBERS)).encode() + b", "),
        (b"'shape'", b"'shapo'"),
        (b"}", b", 'more': 1}"),
    )
    before, after = rng.choice(changes)
    return header.replace(before, after, 1) + data
