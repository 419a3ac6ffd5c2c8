"""The file of a plan: what is written comes back, and no changed byte passes that is checked."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dagexec.errors import DagexecError, ModelFormatError, OutputError
from dagexec.plans.container import Container, DamagedError, Sections
from tests.plans.files import HEADER, put_together, with_manifest

SMALL, LARGE = np.arange(10, dtype=np.float32), np.arange(9000, dtype=np.int64)


def written(path: Path) -> Path:
    sections = Sections()
    numbers = [sections.add(SMALL), sections.add(LARGE), sections.add(b"net"), sections.add(b"")]
    sections.write(path, {"numbers": numbers})
    return path


@pytest.mark.parametrize("mapped", [True, False])
def test_sections_come_back_aligned_read_only_and_once_each(tmp_path: Path, mapped: bool) -> None:
    path = written(tmp_path / "x")
    found = Container(path, mapped=mapped)
    small, large, net, nothing = (found.checked(number) for number in found.plan["numbers"])
    assert (small.view(np.float32) == SMALL).all()
    assert (large.view(np.int64) == LARGE).all()
    assert (net.tobytes(), nothing.tobytes()) == (b"net", b"")
    assert small.ctypes.data % 64 == large.ctypes.data % (4096 if mapped else 64) == 0
    assert not any(one.flags.writeable for one in (small, large, net))


def test_equal_content_is_one_section_and_equal_files_are_equal(tmp_path: Path) -> None:
    sections = Sections()
    assert sections.add(SMALL) == sections.add(SMALL.copy()) != sections.add(SMALL.astype(np.float64))
    assert written(tmp_path / "x").read_bytes() == written(tmp_path / "y").read_bytes()


def test_every_changed_byte_of_header_and_manifest_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "x")
    content = path.read_bytes()
    length = HEADER.unpack(content[: HEADER.size])[4]
    for place in range(HEADER.size + length):
        path.write_bytes(content[:place] + bytes([content[place] ^ 0x10]) + content[place + 1 :])
        with pytest.raises(ModelFormatError, match="x: no plan, or a damaged one"):
            Container(path)


def changed(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def test_a_changed_byte_of_a_small_section_or_behind_it_is_refused(tmp_path: Path) -> None:
    content = written(tmp_path / "x").read_bytes()
    net = content.index(b"net")
    for place in (content.index(SMALL.tobytes()), net, net + len(b"net")):
        changed(path := written(tmp_path / "x"), place)
        with pytest.raises(ModelFormatError, match="the small sections have not the bytes that were written"):
            Container(path)


def test_a_changed_byte_of_a_large_section_is_seen_by_who_checks(tmp_path: Path) -> None:
    path = written(tmp_path / "x")
    changed(path, path.read_bytes().index(LARGE.tobytes()))
    found = Container(path)
    for _ in range(2):
        with pytest.raises(DamagedError, match="section 1 has not the bytes that were written"):
            found.checked(found.plan["numbers"][1])
    with pytest.raises(ModelFormatError, match="its hash is another"):
        Container(path, mapped=False)


@pytest.mark.parametrize("size", [0, 1, 63, 64, 200, 4096, -1, -4096])
def test_a_truncated_file_is_refused(tmp_path: Path, size: int) -> None:
    path = written(tmp_path / "x")
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(ModelFormatError, match=r"x: "):
        Container(path)


def test_a_longer_file_and_another_version_are_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "x")
    content = path.read_bytes()
    path.write_bytes(content + bytes(64))
    with pytest.raises(ModelFormatError, match="it says that it has"):
        Container(path)
    path.write_bytes(content[:8] + (7).to_bytes(4, "little") + content[12:])
    with pytest.raises(ModelFormatError, match="version 7 of the format; this dagexec reads 2: build it again"):
        Container(path)


HASH = hashlib.sha256(bytes(64)).hexdigest()


@pytest.mark.parametrize(
    ("sections", "hashes", "what"),
    [
        ([1 << 40], [HASH, HASH], "its sections have 1099511627776 bytes, found 64"),
        ([1 << 62, 1 << 62], [HASH, HASH, HASH], "its sections have 9223372036854775808 bytes"),
        ([65], [HASH], "its sections have 128 bytes"),
        ([64, 1], [HASH], "its sections have 128 bytes"),
        ([], [HASH], "its sections have 0 bytes"),
        ([-64], [HASH], "expected a number of 0 or more"),
        ([10**30], [HASH], "expected a number of 0 or more"),
        ([True], [HASH], "expected a number of 0 or more"),
        ([8], ["no hash"], "their hash is another"),
        ([8], [None], "their hash is another"),
        ([8], [], "expected a list of 1"),
        ([8], [HASH, HASH], "expected a list of 1"),
        ("sections", [HASH], "expected a list"),
        (None, [HASH], "expected a list"),
    ],
)
def test_sections_that_are_not_the_file_are_refused(tmp_path: Path, sections: Any, hashes: Any, what: str) -> None:
    path = tmp_path / "x"
    manifest = json.dumps({"sections": sections, "hashes": hashes, "plan": {}}).encode()
    path.write_bytes(with_manifest(manifest, bytes(64)))
    with pytest.raises(ModelFormatError, match=what):
        Container(path)


def test_a_file_made_by_hand_is_read(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(
        put_together({"a": 1}, [b"one", LARGE.tobytes(), b"", SMALL.tobytes(), LARGE.tobytes()])
    )
    for mapped in (True, False):
        found = Container(tmp_path / "x", mapped=mapped)
        parts = [found.checked(number).tobytes() for number in range(5)]
        assert (found.plan, parts) == ({"a": 1}, [b"one", LARGE.tobytes(), b"", SMALL.tobytes(), LARGE.tobytes()])


@pytest.mark.parametrize("raw", [b"", b"{", b"[" * 100_000, b"\xff\xfe", b"[]", b'{"plan": 1}', b"NaN"])
def test_a_manifest_that_is_something_else_is_refused(tmp_path: Path, raw: bytes) -> None:
    path = tmp_path / "x"
    path.write_bytes(with_manifest(raw, bytes(64)))
    with pytest.raises(ModelFormatError, match="no plan, or a damaged one"):
        Container(path)


def test_an_unknown_section_is_refused(tmp_path: Path) -> None:
    found = Container(written(tmp_path / "x"))
    for number in (4, -1, "0", 1.0, None):
        with pytest.raises(DamagedError):
            found.checked(number)


def test_what_cannot_be_read_or_written_is_said(tmp_path: Path) -> None:
    with pytest.raises(ModelFormatError, match="cannot be read"):
        Container(tmp_path / "missing")
    with pytest.raises(DagexecError):
        Container(tmp_path)
    with pytest.raises(OutputError):
        written(tmp_path / "no folder" / "x")
    assert list(tmp_path.iterdir()) == []
