"""Code of libraries that is taken out of memory: it is there again when it is called, and what was written to stays."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from pathlib import Path

import numpy as np
import pytest

from dagexec.platform import library_pages

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux tells what is mapped")

LIBRARY = "numpy.libs/libscipy_openblas"  # not that of SciPy: code that nothing else gives back


def mapped(name: str) -> tuple[str, int, int]:
    """Path, address and length of the code of the loaded library of that name."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, access, *_, path = line.split()
        if access == "r-xp" and name in path:
            start, end = (int(number, 16) for number in span.split("-"))
            return path, start, end - start
    pytest.skip(f"no {name} is loaded")


def resident(start: int) -> int:
    """KiB of the mapping that begins at `start`."""
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    while not next(lines).startswith(f"{start:x}-"):
        pass
    return next(int(line.split()[1]) for line in lines if line.startswith("Rss:"))


@pytest.fixture
def nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library_pages, "_mappings", set())
    monkeypatch.setattr(library_pages, "_left", [0])
    monkeypatch.setattr(library_pages, "_made", [100])


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_else")
def test_code_goes_and_comes_back_when_it_is_called() -> None:
    a = np.random.default_rng(0).standard_normal((200, 200)).astype(np.float32)
    before = a @ a
    path, start, _ = mapped(LIBRARY)
    full = resident(start)
    library_pages.give_back_library_pages()
    assert resident(start) == full
    library_pages.give_back_when_prepared(path)
    library_pages.give_back_library_pages()
    given_back = resident(start)
    assert given_back < full
    np.testing.assert_array_equal(a @ a, before)
    used = resident(start)
    assert used > given_back
    for _ in range(100):
        library_pages.note_made()
    library_pages.give_back_library_pages()  # that little is not worth it
    assert resident(start) == used


@pytest.mark.usefixtures("nothing_else")
def test_code_that_was_written_to_is_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "code"
    file.write_bytes(bytes(4 * mmap.PAGESIZE))
    with file.open("r+b") as opened:
        code = mmap.mmap(opened.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    code[0] = 1
    place = ctypes.c_char.from_buffer(code)
    address = ctypes.addressof(place)
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    if protect(ctypes.c_void_p(address), ctypes.c_size_t(len(code)), mmap.PROT_READ | mmap.PROT_EXEC):
        pytest.skip(f"memory that was written may not be executed: {os.strerror(ctypes.get_errno())}")
    assert mapped(str(file))[1] == address
    library_pages.give_back_when_prepared(str(file))
    library_pages.give_back_library_pages()
    assert place.value == b"\x01"
    del place
