"""Assemblers, instruction by instruction, as GNU binutils reads them: recorded, and asked again where it is."""

from __future__ import annotations

import pytest

from tests.platform.assembly.listing import KINDS, disassembled, is_installed, read, written


@pytest.mark.parametrize("name", KINDS)
def test_calls_write_what_is_recorded(name: str) -> None:
    for entry in read(name):
        digits = "".join(code for code, _ in entry.instructions)
        assert _in_order(name, written(KINDS[name], entry.calls)) == digits, entry.calls


@pytest.mark.parametrize("name", KINDS)
def test_the_disassembler_reads_what_is_recorded(name: str) -> None:
    kind = KINDS[name]
    if not is_installed(kind):
        pytest.skip(f"{kind.objdump[0]} is not installed: make test-arm")
    for entry in read(name):
        assert disassembled(kind, written(kind, entry.calls)) == entry.instructions, entry.calls


@pytest.mark.parametrize("name", KINDS)
def test_every_method_is_listed(name: str) -> None:
    kind = KINDS[name]
    methods = {one for one in dir(kind.new()) if not one.startswith("_")} - {"code", "here", "lanes", "is_ordered"}
    called = {call.split()[0] for entry in read(name) for call in entry.calls.split("; ")}
    if name == "avx512":  # shares the others with AVX2
        called |= {call.split()[0] for entry in read("x86_64") for call in entry.calls.split("; ")}
    assert methods - called == {"jump_ahead", "land"}  # their results go from one to the other: every kernel has loops


def _in_order(name: str, code: bytes) -> str:
    """Bytes as the disassembler shows them: words of Arm from the highest byte on."""
    if name != "aarch64":
        return code.hex()
    return "".join(code[place : place + 4][::-1].hex() for place in range(0, len(code), 4))
