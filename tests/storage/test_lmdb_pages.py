"""The pages of lmdb databases, of other programs or with a checksum that fits: whole ones are read, damaged refused."""

from __future__ import annotations

import random
import struct
import subprocess
import sys
import threading
import zlib
from pathlib import Path

import pytest

from dagexec.errors import StorageError
from dagexec.storage import open_database
from dagexec.storage.lmdb_pages import check_pages

lmdb = pytest.importorskip("lmdb")

PAGE = 4096
META_ROOT = 16 + 24 + 48 + 40  # of the tree of records, in a meta page
FREE_ROOT = 16 + 24 + 40


def fill(path: Path, seed: int = 0) -> dict[bytes, bytes]:
    """Make a database of several levels with long values and freed pages, without dagexec; returns its records."""
    draw = random.Random(seed)
    expected: dict[bytes, bytes] = {}
    environment = lmdb.open(str(path), map_size=1 << 26, lock=False)
    for _ in range(4):
        with environment.begin(write=True) as transaction:
            for _ in range(300):
                key, value = b"%08d" % draw.randrange(900), draw.randbytes(draw.choice([0, 10, 300, 1500, 9000]))
                transaction.put(key, value)
                expected[key] = value
            for _ in range(60):
                key = b"%08d" % draw.randrange(900)
                transaction.delete(key)
                expected.pop(key, None)
    environment.close()
    return expected


def records(path: Path) -> dict[bytes, bytes]:
    with open_database("lmdb", path) as database, database.cursor() as cursor:
        return dict(cursor)


def newest_meta(content: bytes) -> int:
    """Where the meta page of the last transaction begins."""
    transactions = [struct.unpack_from("<Q", content, page * PAGE + 16 + 24 + 96 + 8)[0] for page in range(2)]
    return PAGE * transactions.index(max(transactions))


def root(content: bytes, place: int = META_ROOT) -> int:
    """Where the root page of a tree begins."""
    number: int = struct.unpack_from("<Q", content, newest_meta(content) + place)[0]
    return number * PAGE


def leaf(content: bytes) -> int:
    """Where the first leaf of the tree of records begins."""
    page = root(content)
    while struct.unpack_from("<H", content, page + 10)[0] & 1:
        [node] = struct.unpack_from("<H", content, page + 16)
        page = PAGE * struct.unpack_from("<I", content, page + node)[0]
    return page


def big_node(content: bytes) -> int:
    """Where a node with a long value begins, in some leaf."""
    page = leaf(content)
    while True:
        [kind, lower] = struct.unpack_from("<HH", content, page + 10)
        if kind == 2:
            for node in struct.unpack_from(f"<{(lower - 16) // 2}H", content, page + 16):
                if struct.unpack_from("<H", content, page + node + 4)[0] & 1:
                    return page + node
        page += PAGE


@pytest.mark.parametrize("seed", range(5))
def test_a_whole_database_of_another_program_is_read(seed: int, tmp_path: Path) -> None:
    expected = fill(tmp_path / "db", seed)
    assert records(tmp_path / "db") == expected


def test_a_database_without_records_is_read(tmp_path: Path) -> None:
    lmdb.open(str(tmp_path / "db"), lock=False).close()
    assert records(tmp_path / "db") == {}


DAMAGES = {
    "the file of metas alone": (lambda content: PAGE + 16, "<I", 7, "meta page 1: not of an lmdb database"),
    "the size of a page": (lambda content: 16 + 24, "<I", 1000, "meta page 0: a page of 1000 bytes"),
    "the last page": (lambda content: newest_meta(content) + 16 + 24 + 96, "<Q", 1 << 40, "truncated: its pages take"),
    "a tree of duplicates": (lambda content: newest_meta(content) + META_ROOT - 36, "<H", 4, "several values per key"),
    "the depth": (lambda content: newest_meta(content) + META_ROOT - 34, "<H", 900, "a depth of 900"),
    "a root outside": (lambda content: newest_meta(content) + META_ROOT, "<Q", 1 << 33, "are not among pages 2 to"),
    "a root at a meta": (lambda content: newest_meta(content) + META_ROOT, "<Q", 1, "pages 1 to 1 are not among"),
    "the number of a page": (leaf, "<Q", 3, "the header is of page 3"),
    "the kind of a page": (lambda content: leaf(content) + 10, "<H", 4, "kind 0x4; expected 0x2"),
    "the end of the places": (lambda content: leaf(content) + 12, "<H", 65000, "places end at 65000"),
    "the begin of the nodes": (lambda content: leaf(content) + 14, "<H", 65000, "nodes begin at 65000"),
    "the place of a node": (lambda content: leaf(content) + 16, "<H", 4095, "a node at 4095 of 4096"),
    "the key of a node": (lambda content: big_node(content) + 6, "<H", 60000, r"a node at \d+ ends at 6\d+ of 4096"),
    "the length of a long value": (
        lambda content: big_node(content) + 2,
        "<H",
        9000,
        r"pages \d+ to \d+ are not among",
    ),
    "the page of a long value": (lambda content: big_node(content) + 8 + 8, "<Q", 1 << 60, "are not among pages 2 to"),
    "values of a key": (lambda content: big_node(content) + 4, "<H", 4, "several values per key"),
    "a child twice": (
        lambda content: root(content) + struct.unpack_from("<H", content, root(content) + 18)[0],
        "same child",
        0,
        "has two references",
    ),
    "the tree of free pages": (lambda content: newest_meta(content) + FREE_ROOT, "<Q", 1 << 50, "are not among pages"),
    "a list of free pages": (
        lambda content: (page := root(content, FREE_ROOT)) + struct.unpack_from("<H", content, page + 16)[0] + 16,
        "<Q",
        1 << 50,
        "a list of 1,125,899,906,842,624 free pages",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_page_is_refused_before_lmdb_reads_it(damage: str, tmp_path: Path) -> None:
    place, kind, value, message = DAMAGES[damage]
    fill(tmp_path / "db")
    file = tmp_path / "db" / "data.mdb"
    content = bytearray(file.read_bytes())
    if kind == "same child":
        first = root(content) + struct.unpack_from("<H", content, root(content) + 16)[0]
        content[place(content) : place(content) + 6] = content[first : first + 6]
    else:
        struct.pack_into(kind, content, place(content), value)
    file.write_bytes(content)
    with pytest.raises(StorageError, match=f"data.mdb: damaged: .*{message}"):
        records(tmp_path / "db")


def test_a_damaged_page_is_refused_when_its_checksum_was_made_to_fit(tmp_path: Path) -> None:
    fill(tmp_path / "db")
    file = tmp_path / "db" / "data.mdb"
    content = bytearray(file.read_bytes())
    struct.pack_into("<Q", content, newest_meta(content) + META_ROOT, 1 << 33)
    file.write_bytes(content)
    (tmp_path / "db" / "data.crc32").write_text(f"{zlib.crc32(content):08x} {len(content)}")
    with pytest.raises(StorageError, match="are not among pages 2 to"):
        open_database("lmdb", tmp_path / "db")


def test_a_file_without_a_byte_is_refused(tmp_path: Path) -> None:
    (tmp_path / "data.mdb").write_bytes(b"")
    with pytest.raises(StorageError, match=r"data\.mdb: damaged: it is empty"):
        records(tmp_path)


RANDOM_DAMAGE = """
import random, sys
from pathlib import Path
from dagexec.errors import StorageError
from tests.storage.test_lmdb_pages import PAGE, fill, records

folder, draw = Path(sys.argv[1]), random.Random(3)
fill(folder / "db")
file = folder / "db" / "data.mdb"
whole, refused = file.read_bytes(), 0
for _ in range(250):
    damaged = bytearray(whole)
    for _ in range(draw.randint(1, 3)):
        page = draw.choice([0, 1, draw.randrange(len(whole) // PAGE)])
        place = page * PAGE + draw.choice([draw.randrange(160), draw.randrange(PAGE - 8)])
        damaged[place : place + 8] = draw.choice([draw.randbytes(8), draw.randrange(3000).to_bytes(8, "little")])
    file.unlink()
    file.write_bytes(damaged)
    try:
        records(folder / "db")
    except StorageError:
        refused += 1
print(refused)
"""


@pytest.mark.slow
def test_no_damage_ends_the_process(tmp_path: Path) -> None:
    found = subprocess.run(
        [sys.executable, "-c", RANDOM_DAMAGE, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    assert found.returncode == 0, found.stderr
    assert int(found.stdout) > 30


def test_a_database_that_another_process_writes_to_is_not_taken_for_damaged(tmp_path: Path) -> None:
    fill(tmp_path / "db")
    environment = lmdb.open(str(tmp_path / "db"), map_size=1 << 26, lock=False)
    over = threading.Event()

    def write() -> None:
        draw = random.Random(1)
        while not over.is_set():
            with environment.begin(write=True) as transaction:
                for _ in range(5):
                    transaction.put(b"%08d" % draw.randrange(900), draw.randbytes(draw.choice([10, 3000])))

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(40):
            check_pages(tmp_path / "db" / "data.mdb")
    finally:
        over.set()
        writer.join()
        environment.close()
