"""Product code that writes, renames or removes files does so through `dagexec.platform.disk`, where faults are tried.

An outsider would be found here: one that no test of faults knows of.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import dagexec

ROOT = Path(dagexec.__file__).parent

EXEMPT = {
    "platform/disk.py": "it is the disk",
    "platform/files.py: os.open": "devices and pipes, which keep nothing",
    "training/folder_lock.py": "a lock, which ends with its process",
    "ops/families/communication/store.py: open": "a lock likewise",
    "server/shared_memory.py: os.pwrite": "to memory, which keeps nothing",
    "server/log.py: os.write": "to the standard error stream",
    "cli/__init__.py: os.open": "of /dev/null",
    "frontend/onnx/external_data.py: os.open": "to read",
    "stress/simulated_disk.py": "makes what a loss of power leaves",
    "testing/exploring.py": "which schedule is tried, for whoever asks why the process died",
    "stress/simulation.py": "the folder of a simulated disk",
    "stress/watchdog.py: tempfile": "the stacks of a process that hangs",
    "foreign/onnx_runtime_island.py: tempfile": "a profile that is read at once",
    "cluster/ray_session.py": "the folder of a cluster that ends with this process",
    "training/safetensors_file.py: serialize_file": "into an Unpublished, which synchronizes it",
}
"""Where files are written otherwise, and why that is right. What lmdb commits it synchronizes itself."""

MODULES = {"tempfile", "shutil"}
RENAMES = {"replace", "rename", "renames", "unlink", "remove", "rmdir", "removedirs", "mkdir", "makedirs", "symlink"}
SYSTEM = {"write", "pwrite", "fsync", "fdatasync", "truncate", "ftruncate", *RENAMES}
CONTENT = {"write_text", "write_bytes", "tofile", "touch"}
METHODS = {"unlink", "rename", "rmdir", "mkdir", "symlink_to", "hardlink_to", *CONTENT}
NUMPY = {"save", "savez", "savez_compressed", "savetxt", "memmap"}
LIBRARIES = {"serialize_file", "save_model", "ZipFile"}  # given a path, and not a file


def writes(tree: ast.AST) -> Iterator[str]:
    """What in a module may write a file by itself."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = {alias.name for alias in node.names} | {getattr(node, "module", "")}
            yield from names & MODULES
        elif isinstance(node, ast.Call):
            owner, _, name = ast.unparse(node.func).rpartition(".")
            in_place = owner not in ("", "os", "disk()", "draft") and name in METHODS
            opens = name in ("open", "FileIO") and owner not in ("os", "disk()", "archive") and may_write(node)
            by_library = name in LIBRARIES and "file" not in map(ast.unparse, node.args)
            if owner == "os" and (name in SYSTEM or (name == "open" and "O_RDONLY" not in ast.unparse(node))):
                yield f"os.{name}"
            elif in_place or opens or by_library or (owner in ("np", "numpy") and name in NUMPY):
                yield name


def may_write(call: ast.Call) -> bool:
    """One of its arguments is a mode in which files are written."""
    given = [*call.args, *(keyword.value for keyword in call.keywords)]
    texts = [one.value for one in given if isinstance(one, ast.Constant) and isinstance(one.value, str)]
    return any(set(text) <= set("rwabx+t") and set(text) & set("wax+") for text in texts)


_LOOKED_AT = re.compile(
    r"\b(?:os\.(?:open|" + "|".join(SYSTEM) + r")|(?:np|numpy)\.(?:" + "|".join(NUMPY) + r"))\(|"
    r"\.(?:" + "|".join(METHODS) + r")\(|\bopen\(|FileIO|" + "|".join(MODULES | LIBRARIES)
)
"""Text of modules that are worth to be parsed."""


def test_nothing_is_written_past_the_disk() -> None:
    found = set()
    for folder in (ROOT, ROOT / "ops", ROOT / "scheduler"):  # of which two are links
        for path in folder.rglob("*.py"):
            module, text = str(path.relative_to(ROOT)), path.read_text()
            if module not in EXEMPT and _LOOKED_AT.search(text):
                found |= {f"{module}: {what}" for what in writes(ast.parse(text))}
    assert found - set(EXEMPT) == set()
    assert {place for place in EXEMPT if ": " in place} <= found


@pytest.mark.parametrize(
    "code",
    [
        "open(path, 'w')",
        "path.open('ab')",
        "open(path, mode='r+b')",
        "io.FileIO(path, 'xb')",
        "os.open(path, os.O_WRONLY)",
        "os.replace(a, b)",
        "path.write_bytes(b'')",
        "self.path.unlink()",
        "np.savez(path)",
        "array.tofile(path)",
        "import shutil",
        "from tempfile import mkdtemp",
        "onnx.save_model(proto, path)",
    ],
)
def test_a_writer_of_its_own_is_found(code: str) -> None:
    assert _LOOKED_AT.search(code)
    assert list(writes(ast.parse(code)))
