"""Versions of blobs: what a net's blob names stand for at each operator, as each write makes another value of a name.

A name begins at version 0, the value it has before the net runs; an operator that writes it, in place or not, makes the
next version. So "the value operator 7 read" has a name of its own: `Version("x", 1)`.
"""

from __future__ import annotations

from typing import NamedTuple

from dagexec.core.proto import NetDef
from dagexec.platform.records import dataclass


class Version(NamedTuple):
    """The value of blob `blob` after `number` operators have written it."""

    blob: str
    number: int


@dataclass(frozen=True)
class BlobVersions:
    """The versions that the operators of a net read and write (static single assignment form).

    Attributes:
        inputs, outputs: for each operator the versions it reads and writes, in the order of its def.
        last: the version of each name when the net has run.
        writers: the operator that makes a version; versions 0 have none.
        first_readers: the first operator that reads a version.
    """

    inputs: tuple[tuple[Version, ...], ...]
    outputs: tuple[tuple[Version, ...], ...]
    last: dict[str, int]
    writers: dict[Version, int]
    first_readers: dict[Version, int]

    def final(self, blob: str) -> Version:
        """The version of `blob` when the net has run."""
        return Version(blob, self.last.get(blob, 0))

    def is_final(self, version: Version) -> bool:
        """True when nothing overwrites this version."""
        return self.last.get(version.blob, 0) == version.number

    def overwriter(self, version: Version) -> int:
        """The operator that overwrites a version which is not final."""
        return self.writers[Version(version.blob, version.number + 1)]

    def starts_outside(self, blob: str) -> bool:
        """True when `blob` is read before any operator writes it."""
        return Version(blob, 0) in self.first_readers


def find_versions(net: NetDef) -> BlobVersions:
    """The versions of the blobs of `net`; one pass over its operators."""
    last: dict[str, int] = dict.fromkeys(net.external_input, 0)
    writers: dict[Version, int] = {}
    first_readers: dict[Version, int] = {}
    inputs, outputs = [], []
    for index, definition in enumerate(net.op):
        read = tuple(Version(blob, last.setdefault(blob, 0)) for blob in definition.input)
        for version in read:
            first_readers.setdefault(version, index)
        written = []
        for blob in definition.output:
            last[blob] = last.get(blob, 0) + 1
            written.append(Version(blob, last[blob]))
            writers[written[-1]] = index
        inputs.append(read)
        outputs.append(tuple(written))
    return BlobVersions(tuple(inputs), tuple(outputs), last, writers, first_readers)
