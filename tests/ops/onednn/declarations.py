"""Writes `ops/engines/onednn/declared.py`, what cffi makes of `declarations.h`: run as a program (`make cffi`)."""

from __future__ import annotations

from pathlib import Path

from cffi import FFI

FOLDER = Path(__file__).resolve().parents[3] / "ops" / "engines" / "onednn"
MODULE = "declared.py"


def write(folder: Path) -> None:
    ffi = FFI()
    ffi.set_source("dagexec.ops.engines.onednn.declared", None)
    ffi.cdef((FOLDER / "declarations.h").read_text())
    ffi.emit_python_code(str(folder / MODULE))


if __name__ == "__main__":
    write(FOLDER)
