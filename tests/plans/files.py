"""Files of plans taken apart and put together again with hashes and places that are right, as malice would."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Sequence

HEADER = struct.Struct("<8sIIQQ32s")
MAGIC = b"\x89dagexec"


def taken_apart(content: bytes) -> tuple[object, list[bytes]]:
    """What the manifest says of the plan, and the sections. Raises ValueError for what is no such file."""
    magic, _, _, _, length, _ = HEADER.unpack(content[: HEADER.size])
    if magic != MAGIC:
        raise ValueError("no plan")
    manifest = json.loads(content[HEADER.size : HEADER.size + length])
    base = _aligned(HEADER.size + length)
    return manifest["plan"], [content[base + start : base + start + size] for start, size, _ in manifest["sections"]]


def put_together(plan: object, sections: Sequence[bytes]) -> bytes:
    """The file."""
    body, entries = b"", []
    for one in sections:
        body = body.ljust(_aligned(len(body)), b"\0")
        entries.append([len(body), len(one), hashlib.sha256(one).hexdigest()])
        body += one
    return with_manifest(json.dumps({"sections": entries, "plan": plan}).encode(), body)


def with_manifest(manifest: bytes, body: bytes) -> bytes:
    """The file with any bytes for a manifest."""
    start = _aligned(HEADER.size + len(manifest))
    digest = hashlib.sha256(manifest).digest()
    header = HEADER.pack(MAGIC, 1, 0, start + len(body), len(manifest), digest)
    return (header + manifest).ljust(start, b"\0") + body


def _aligned(size: int) -> int:
    return -(-size // 4096) * 4096
