"""Mistakes in how files are read, checked and replaced."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

_FORMATS = ("databases", "lmdb_pages", "net_file", "tensor_proto", "wire")
_DATABASES = tuple(f"tests/storage/test_{name}.py" for name in _FORMATS)
_DURABILITY = ("tests/storage/test_power_loss.py",)
_FILES = "dagexec/platform/files.py"
_CHECKPOINTS = ("tests/training/test_checkpoint.py",)

MUTANTS = (
    Mutant(
        "records of negative length are read",
        "dagexec/storage/minidb.py",
        "if key_length < 0 or value_length < 0:",
        "if False:",
        _DATABASES,
    ),
    Mutant(
        "a record may reach one byte over the end",
        "dagexec/storage/minidb.py",
        "if key_length + value_length > rest:",
        "if key_length + value_length > rest + 1:",
        _DATABASES,
    ),
    Mutant(
        "an aborted transaction leaves its records",
        "dagexec/storage/minidb.py",
        "            file.truncate(size)",
        "            pass",
        _DATABASES,
    ),
    Mutant(
        "a changed record agrees with its checksum",
        "dagexec/storage/blob_file.py",
        "if written[key] != [crc, size]:",
        "if written[key][1] != size:",
        _DATABASES,
    ),
    Mutant(
        "records that are missing are not missed",
        "dagexec/storage/blob_file.py",
        "    missing = [key for key in written if key not in found]\n",
        "    missing: list[str] = []\n",
        _DATABASES,
    ),
    Mutant(
        "chunks with a gap between them are taken",
        "dagexec/storage/blob_proto.py",
        "            if begin > reached:\n                break\n",
        "",
        _DATABASES,
    ),
    Mutant(
        "a value that does not fit its type is cut",
        "dagexec/storage/tensor_proto.py",
        "    if not np.array_equal(narrow, values):",
        "    if False:",
        _DATABASES,
    ),
    Mutant(
        "pages are trusted where the checksum fits",
        "dagexec/storage/lmdb_database.py",
        "        _compare_checksum(path)\n        check_pages(path / _FILE)",
        "        _compare_checksum(path)",
        _DATABASES,
    ),
    Mutant(
        "what somebody writes just now is removed as left over",
        "dagexec/platform/files.py",
        "                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)\n                if stat.",
        "                if stat.",
        _DATABASES,
    ),
    Mutant(
        "a damaged checkpoint counts as one to keep",
        "dagexec/training/checkpoint.py",
        "elif whole < keep and _is_whole(path):",
        "elif whole < keep:",
        _CHECKPOINTS,
    ),
    Mutant(
        "a checkpoint of another type fits",
        "dagexec/training/checkpoint.py",
        "if (tensor.shape, tensor.meta) != (array.shape, meta):",
        "if tensor.shape != array.shape:",
        _CHECKPOINTS,
    ),
    Mutant(
        "what takes a place need not be on the disk",
        _FILES,
        "    disk().synchronize(path)\n    disk().replace",
        "    disk().replace",
        _DURABILITY,
    ),
    Mutant(
        "the name of what took a place need not be on the disk",
        _FILES,
        "    disk().synchronize(target.parent)\n",
        "",
        _DURABILITY,
    ),
    Mutant(
        "content is brought to the disk when it has its name",
        _FILES,
        "    disk().synchronize(path)\n    disk().replace(path, target)\n",
        "    disk().replace(path, target)\n    disk().synchronize(target)\n",
        _DURABILITY,
    ),
    Mutant(
        "records that are added need not be on the disk",
        "dagexec/storage/minidb.py",
        "                disk().synchronize(self._path)\n",
        "                pass\n",
        _DURABILITY,
    ),
    Mutant(
        "the checksum of a database takes its place as it is",
        "dagexec/storage/lmdb_database.py",
        "    put_in_place(unfinished, target)\n",
        "    disk().replace(unfinished, target)\n",
        _DURABILITY,
    ),
    Mutant(
        "a folder that was made for a file need not be on the disk",
        "dagexec/platform/disk.py",
        "    disk().synchronize(path.parent)\n",
        "",
        _DURABILITY,
    ),
    Mutant(
        "the data that a model in place reads from is replaced before the model",
        "dagexec/export/onnx_model.py",
        " not in old)",
        ")",
        _DURABILITY,
    ),
    Mutant(
        "nobody knows where records that are being added begin",
        "dagexec/storage/minidb.py",
        "                write_atomically(_mark_of(path), _end_of(path).encode())\n",
        "",
        _DURABILITY,
    ),
)
