"""Files of plans taken apart and put together again with hashes and places that are right, as malice would."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Sequence

HEADER = struct.Struct("<8sIIQQ32s")
MAGIC = b"\x89dagexec"
LINE, PAGE, SMALL = 64, 4096, 16 << 10


def taken_apart(content: bytes) -> tuple[object, list[bytes]]:
    """What the manifest says of the plan, and the sections. Raises ValueError for what is no such file."""
    magic, _, _, _, length, _ = HEADER.unpack(content[: HEADER.size])
    if magic != MAGIC:
        raise ValueError("no plan")
    manifest = json.loads(content[HEADER.size : HEADER.size + length])
    base, sizes = _aligned(HEADER.size + length, PAGE), manifest["sections"]
    return manifest["plan"], [
        content[base + at : base + at + size] for at, size in zip(places(sizes), sizes, strict=True)
    ]


def put_together(plan: object, sections: Sequence[bytes]) -> bytes:
    """The file."""
    sizes = list(map(len, sections))
    starts, body = places(sizes), bytearray()
    small = sum(_aligned(size, LINE) for size in sizes if size <= SMALL)
    for start, one in sorted(zip(starts, sections, strict=True)):
        body[len(body) :] = bytes(start - len(body)) + one
    body[len(body) :] = bytes(max(0, small - len(body)))
    hashed = [body[:small], *(one for one in sections if len(one) > SMALL)]
    hashes = [hashlib.sha256(one).hexdigest() for one in hashed]
    return with_manifest(json.dumps({"sections": sizes, "hashes": hashes, "plan": plan}).encode(), bytes(body))


def places(sizes: Sequence[int]) -> list[int]:
    """Where sections of so many bytes begin: small ones on lines, and behind them the others on pages."""
    starts, end = [0] * len(sizes), 0
    for large in (False, True):
        for number, size in enumerate(sizes):
            if (size > SMALL) == large:
                starts[number] = _aligned(end, PAGE if large else LINE)
                end = starts[number] + (size if large else _aligned(size, LINE))
    return starts


def with_manifest(manifest: bytes, body: bytes) -> bytes:
    """The file with any bytes for a manifest."""
    start = _aligned(HEADER.size + len(manifest), PAGE)
    digest = hashlib.sha256(manifest).digest()
    header = HEADER.pack(MAGIC, 2, 0, start + len(body), len(manifest), digest)
    return (header + manifest).ljust(start, b"\0") + body


def _aligned(size: int, alignment: int) -> int:
    return -(-size // alignment) * alignment
