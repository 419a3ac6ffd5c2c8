from __future__ import annotations

import builtins
import os
import random
import resource
import struct
import sys
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest

from dagexec.errors import OutputError, StorageError
from dagexec.platform.files import Unpublished
from dagexec.storage import Mode, database_exists, database_types, open_database
from dagexec.storage.blob_file import INTEGRITY_KEY, read_blob_file, write_blobs
from dagexec.storage.reader import DBReader

TYPES = ["minidb", "lmdb"]
RECORDS = [(b"a", b"1"), (b"b", b""), (b"c", b"x" * 5000)]
BLOBS = {"w": np.arange(12, dtype=np.float32).reshape(3, 4), "n": np.array([7], np.int64)}


def fill(db_type: str, path: Path, records: Iterable[tuple[bytes, bytes]], mode: Mode = Mode.NEW) -> None:
    with open_database(db_type, path, mode) as database, database.transaction() as transaction:
        for key, value in records:
            transaction.put(key, value)


def failing() -> Iterator[tuple[bytes, bytes]]:
    yield b"z", b"new"
    raise RuntimeError


def content(db_type: str, path: Path) -> list[tuple[bytes, bytes]]:
    with open_database(db_type, path) as database, database.cursor() as cursor:
        return list(cursor)


def hidden(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize("db_type", TYPES)
def test_records_come_back_and_more_can_be_added(db_type: str, tmp_path: Path) -> None:
    path = tmp_path / "deep" / "db"
    assert not database_exists(db_type, path)
    fill(db_type, path, RECORDS)
    assert database_exists(db_type, path)
    assert content(db_type, path) == RECORDS
    fill(db_type, path, [(b"d", b"4")], Mode.WRITE)
    assert content(db_type, path) == [*RECORDS, (b"d", b"4")]
    with open_database(db_type, path) as database, database.cursor() as cursor:
        cursor.seek(b"c")
        assert cursor.value == b"x" * 5000
        cursor.seek(b"nowhere")
        assert not cursor.valid
    assert hidden(path.parent) == []


@pytest.mark.parametrize("db_type", TYPES)
def test_a_new_database_replaces_the_old_one_only_when_it_is_committed(db_type: str, tmp_path: Path) -> None:
    path = tmp_path / "db"
    fill(db_type, path, RECORDS)
    with open_database(db_type, path, Mode.NEW) as database:
        transaction = database.transaction()
        transaction.put(b"z", b"new")
        transaction.abort()
    assert content(db_type, path) == RECORDS
    with pytest.raises(RuntimeError):
        fill(db_type, path, failing())
    assert content(db_type, path) == RECORDS
    fill(db_type, path, [(b"z", b"new")])
    assert content(db_type, path) == [(b"z", b"new")]
    assert hidden(tmp_path) == []


@pytest.mark.parametrize("db_type", TYPES)
def test_a_new_database_that_is_given_up_leaves_nothing(db_type: str, tmp_path: Path) -> None:
    with open_database(db_type, tmp_path / "db", Mode.NEW):
        pass
    with open_database(db_type, tmp_path / "db", Mode.NEW) as database:
        transaction = database.transaction()
        transaction.put(b"k", b"v")
        transaction.abort()
        with pytest.raises(StorageError, match="this transaction has ended"):
            transaction.put(b"k", b"v")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("db_type", TYPES)
def test_a_mode_that_does_not_fit_is_refused(db_type: str, tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=str(tmp_path / "none")):
        open_database(db_type, tmp_path / "none")
    fill(db_type, tmp_path / "db", RECORDS)
    with open_database(db_type, tmp_path / "db") as database, pytest.raises(StorageError, match=r"Mode\.WRITE"):
        database.transaction()
    with open_database(db_type, tmp_path / "db", Mode.WRITE) as database, pytest.raises(StorageError, match="reading"):
        database.cursor()


def test_an_unknown_type_is_an_error_that_names_those_there_are(tmp_path: Path) -> None:
    assert database_types() == ["lmdb", "minidb"]
    with pytest.raises(StorageError, match="'leveldb' is unknown; expected one of lmdb, minidb"):
        open_database("leveldb", tmp_path)


def test_a_missing_lmdb_module_is_answered_with_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "lmdb", None)
    with pytest.raises(StorageError, match="pip install 'lmdb>="):
        open_database("lmdb", tmp_path / "db", Mode.NEW)


def test_minidb_is_lengths_key_and_value_in_a_row(tmp_path: Path) -> None:
    fill("minidb", tmp_path / "db", [(b"key", b"value"), (b"k", b"")])
    assert (tmp_path / "db").read_bytes() == struct.pack("<ii", 3, 5) + b"keyvalue" + struct.pack("<ii", 1, 0) + b"k"


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (struct.pack("<ii", -1, 2), "negative length"),
        (struct.pack("<ii", 2, -5), "negative length"),
        (struct.pack("<ii", 1, 1 << 30) + b"k", "a value of 1,073,741,824 bytes; 1 follow"),
        (struct.pack("<ii", 1, 2) + b"kv", "a key of 1 and a value of 2 bytes; 2 follow"),
        (b"abc", "it ends after 3 bytes"),
    ],
)
def test_a_damaged_minidb_is_named_with_the_offset(damage: bytes, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "db"
    fill("minidb", path, [(b"key", b"value")])
    with path.open("ab") as file:
        file.write(damage)
    with pytest.raises(StorageError, match=f"{path}: damaged at offset 16: .*{problem}"):
        content("minidb", path)


def test_records_of_a_transaction_that_is_aborted_are_cut_off(tmp_path: Path) -> None:
    """Those that have gone to the file, because they do not fit into its buffer, too."""
    path = tmp_path / "db"
    fill("minidb", path, RECORDS)
    with open_database("minidb", path, Mode.WRITE) as database:
        transaction = database.transaction()
        transaction.put(b"long", bytes(1 << 20))
        assert path.stat().st_size > 1 << 20
        transaction.abort()
    assert content("minidb", path) == RECORDS


def test_a_record_that_was_taken_out_is_missed(tmp_path: Path) -> None:
    """What is left is whole, and each record has its checksum."""
    write_blobs("minidb", tmp_path / "db", BLOBS.items(), chunk_size=-1)
    records = content("minidb", tmp_path / "db")
    fill("minidb", tmp_path / "less", [record for record in records if record[0] != b"n"])
    with pytest.raises(StorageError, match="damaged: 1 records are missing, including 'n'"):
        read_blob_file("minidb", tmp_path / "less")


@pytest.mark.parametrize("db_type", TYPES)
def test_every_flipped_byte_and_every_cut_of_a_blob_file_is_found(db_type: str, tmp_path: Path) -> None:
    path = tmp_path / "db"
    write_blobs(db_type, path, BLOBS.items(), chunk_size=5)
    file = path if db_type == "minidb" else path / "data.mdb"
    whole = file.read_bytes()
    draw = random.Random(3)
    places = range(len(whole)) if db_type == "minidb" else draw.sample(range(len(whole)), 40)
    for place in places:
        damaged = bytearray(whole)
        damaged[place] ^= 1 << draw.randrange(8)
        file.write_bytes(damaged)
        with pytest.raises(StorageError, match=str(path)):
            read_blob_file(db_type, path, require_checksums=True)
    for size in [0, *draw.sample(range(len(whole)), 30)]:
        file.write_bytes(whole[:size])
        with pytest.raises(StorageError, match=str(path)):
            read_blob_file(db_type, path, require_checksums=True)
    file.write_bytes(whole)
    assert list(read_blob_file(db_type, path).tensors) == (["w", "n"] if db_type == "minidb" else ["n", "w"])


def test_the_damaged_record_is_named(tmp_path: Path) -> None:
    path = tmp_path / "db"
    write_blobs("minidb", path, BLOBS.items())
    damaged = bytearray(path.read_bytes())
    place = damaged.index(np.float32(11).tobytes())
    damaged[place] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(StorageError, match="record 'w' was written with checksum"):
        read_blob_file("minidb", path)


def test_an_lmdb_does_not_take_the_place_of_a_file(tmp_path: Path) -> None:
    write_blobs("minidb", tmp_path / "db", BLOBS.items())
    before = (tmp_path / "db").read_bytes()
    with pytest.raises(StorageError, match="db: cannot be written: it is a file, and an lmdb database is a folder"):
        write_blobs("lmdb", tmp_path / "db", BLOBS.items())
    assert (tmp_path / "db").read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 1


def test_an_lmdb_that_was_cut_off_and_has_no_checksum_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "db"
    fill("lmdb", path, [(b"k%d" % k, b"x" * 3000) for k in range(20)])
    (path / "data.crc32").unlink()
    os.truncate(path / "data.mdb", (path / "data.mdb").stat().st_size - 8192)
    with pytest.raises(StorageError, match=r"data\.mdb: damaged: .*truncated"):
        content("lmdb", path)


def test_a_blob_file_without_checksums_is_read_unless_they_are_required(tmp_path: Path) -> None:
    path = tmp_path / "db"
    write_blobs("minidb", path, BLOBS.items())
    fill("minidb", tmp_path / "caffe2", [r for r in content("minidb", path) if r[0] != INTEGRITY_KEY.encode()])
    found = read_blob_file("minidb", tmp_path / "caffe2")
    assert not found.is_checked
    np.testing.assert_array_equal(found.tensors["w"], BLOBS["w"])
    with pytest.raises(StorageError, match="the checksums are missing"):
        read_blob_file("minidb", tmp_path / "caffe2", require_checksums=True)


@pytest.fixture
def small_files() -> Iterator[None]:
    """The system lets files of this process grow to 64 KiB, as a full disk would."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("db_type", TYPES)
@pytest.mark.parametrize("before", [True, False])
@pytest.mark.usefixtures("small_files")
def test_a_full_disk_leaves_the_old_file_and_nothing_else(db_type: str, before: bool, tmp_path: Path) -> None:
    path = tmp_path / "db"
    if before:
        write_blobs(db_type, path, BLOBS.items())
    with pytest.raises(OutputError, match=f"{path}: cannot be written: .*{'stay' if before else 'nothing is left'}"):
        write_blobs(db_type, path, {"big": np.zeros(1 << 16)}.items(), chunk_size=10_000)
    assert [name.name for name in tmp_path.iterdir()] == (["db"] if before else [])
    if before:
        np.testing.assert_array_equal(read_blob_file(db_type, path, require_checksums=True).tensors["w"], BLOBS["w"])


def test_what_a_killed_process_left_is_removed_and_what_is_being_written_stays(tmp_path: Path) -> None:
    child = os.fork()
    if not child:
        Unpublished(tmp_path / "db").path.write_bytes(b"half")
        os._exit(0)
    os.waitpid(child, 0)
    assert len(hidden(tmp_path)) == 1
    mine = Unpublished(tmp_path / "db")
    assert hidden(tmp_path) == [mine.path.name]
    other = Unpublished(tmp_path / "db")
    assert sorted(hidden(tmp_path)) == sorted([mine.path.name, other.path.name])
    mine.path.write_bytes(b"whole")
    mine.publish()
    other.discard()
    assert (tmp_path / "db").read_bytes() == b"whole"
    assert hidden(tmp_path) == []


def test_two_blobs_of_a_name_are_refused_and_nothing_is_written(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="two blobs have the name 'w'"):
        write_blobs("minidb", tmp_path / "db", [("w", BLOBS["w"]), ("w", BLOBS["w"])])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("db_type", TYPES)
def test_shards_share_the_records_and_go_round(db_type: str, tmp_path: Path) -> None:
    fill(db_type, tmp_path / "db", [(b"%d" % k, b"") for k in range(5)])
    readers = [DBReader(db_type, tmp_path / "db", 2, shard) for shard in range(2)]
    assert [[reader.read()[0] for _ in range(5)] for reader in readers] == [
        [b"0", b"2", b"4", b"0", b"2"],
        [b"1", b"3", b"1", b"3", b"1"],
    ]
    with pytest.raises(StorageError, match="no record for shard 6 of 7"):
        DBReader(db_type, tmp_path / "db", 7, 6)
    with pytest.raises(StorageError, match="shard 2 of 2"):
        DBReader(db_type, tmp_path / "db", 2, 2)
    for reader in readers:
        reader.close()


def test_threads_that_share_a_reader_get_each_record_once(tmp_path: Path) -> None:
    fill("minidb", tmp_path / "db", [(b"%d" % k, b"") for k in range(400)])
    reader = DBReader("minidb", tmp_path / "db")
    found: list[bytes] = []
    threads = [
        threading.Thread(target=lambda: found.extend(reader.read()[0] for _ in range(100))) for _ in builtins.range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == sorted(b"%d" % k for k in range(400))
