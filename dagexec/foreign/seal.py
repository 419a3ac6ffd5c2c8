"""A seal on what the compiler of this process made, which no file can have: runtimes trust the messages of islands."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from dagexec.platform.lazy import LazyModule

if not TYPE_CHECKING:
    hashlib = LazyModule("hashlib")  # it loads OpenSSL, 4 MB
    hmac = LazyModule("hmac")
else:
    import hashlib
    import hmac

_SECRET = os.urandom(32)


def seal_of(*contents: bytes) -> str:
    """The seal of these contents; children made by `os.fork` know it, too."""
    found = hmac.new(_SECRET, digestmod=hashlib.sha256)
    for content in contents:
        found.update(len(content).to_bytes(8, "little") + content)
    return found.hexdigest()


def is_sealed(seal: str, *contents: bytes) -> bool:
    """True when `seal` was made for these contents in this process, or in one that it was forked from."""
    return hmac.compare_digest(seal.encode(), seal_of(*contents).encode())
