"""Listings: what calls of an assembler write, as bytes and as GNU binutils' disassembler reads them.

    load 3 A0 RESULT 32; store 3 A1 None
      8b080010  add x16, x0, x8
      ad411a06  ldp q6, q7, [x16, #32]

A line that begins with a word is calls, of methods with their arguments. `python -m tests.platform.assembly.listing`
writes the lines below each anew; they are to be read before they are committed.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from shutil import which

from dagexec.platform.assembly import aarch64, aarch64_vectors, instructions, x86_64, x86_64_vectors

FOLDER = Path(__file__).parent

Writer = x86_64.GeneralAssembler | aarch64.GeneralAssembler


@dataclass(frozen=True)
class Kind:
    """A processor.

    Attributes:
        new: makes an assembler.
        objdump: the program, and the name of the processor.
    """

    new: Callable[[], Writer]
    objdump: tuple[str, ...]


_X86, _ARM = ("objdump", "-M", "intel", "-m", "i386:x86-64"), ("aarch64-linux-gnu-objdump", "-m", "aarch64")
KINDS = {
    "x86_64": Kind(lambda: x86_64_vectors.Assembler(8), _X86),
    "avx512": Kind(lambda: x86_64_vectors.Assembler(16), _X86),
    "aarch64": Kind(lambda: aarch64_vectors.Assembler(8), _ARM),
}


@dataclass
class Entry:
    """Calls, and the instructions that they write: bytes in hexadecimal digits, and their meaning."""

    calls: str
    instructions: list[tuple[str, str]] = field(default_factory=list)


def read(name: str) -> list[Entry]:
    """The listing of a kind."""
    entries: list[Entry] = []
    for line in (FOLDER / f"{name}.txt").read_text().splitlines():
        if line.startswith("  "):
            digits, _, meaning = line.strip().partition("  ")
            entries[-1].instructions.append((digits, meaning))
        elif line:
            entries.append(Entry(line))
    return entries


def written(kind: Kind, calls: str) -> bytes:
    """What calls write, without what begins every function and what follows it, such as constants."""
    code = kind.new()
    start = code.here()
    for call in calls.split("; "):
        name, *arguments = call.split()
        numbers = [_argument(one) for one in arguments if "=" not in one]
        named = {key: _argument(value) for key, _, value in (one.partition("=") for one in arguments if "=" in one)}
        getattr(code, name)(*numbers, **named)
    end = code.here()
    return code.code()[start:end]


def _argument(text: str) -> object:
    if text in ("None", "True", "False"):
        return {"None": None, "True": True, "False": False}[text]
    if "," in text:
        return [int(one, 0) for one in text.split(",")]
    if "." in text and text.replace(".", "").strip("-").isdigit():
        return float(text)
    return getattr(instructions, text) if hasattr(instructions, text) else text[1:] if text[0] == "'" else int(text, 0)


def is_installed(kind: Kind) -> bool:
    """True where the disassembler is."""
    return which(kind.objdump[0]) is not None


def disassembled(kind: Kind, code: bytes) -> list[tuple[str, str]]:
    """The instructions of code."""
    with tempfile.NamedTemporaryFile(suffix=".bin") as file:
        file.write(code)
        file.flush()
        command = [*kind.objdump, "-D", "-z", "-w", "-b", "binary", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.findall(r"^ *[0-9a-f]+:\t([0-9a-f ]+?) *\t(.*)$", text, re.MULTILINE)
    return [(digits.replace(" ", ""), _plain(meaning)) for digits, meaning in found]


def _plain(meaning: str) -> str:
    """Without comments and runs of blanks."""
    return " ".join(re.sub(r"//.*|#[^-0-9].*| +# 0x.*", "", meaning).split())


def main() -> None:
    """Write all listings anew."""
    for name, kind in KINDS.items():
        text = ""
        for entry in read(name):
            lines = disassembled(kind, written(kind, entry.calls))
            text += f"{entry.calls}\n" + "".join(f"  {digits}  {meaning}\n" for digits, meaning in lines)
        (FOLDER / f"{name}.txt").write_text(text)


if __name__ == "__main__":
    main()
