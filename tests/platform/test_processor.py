"""What is known of the processor, from files that are made up and from the library."""

from __future__ import annotations

import math
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from dagexec.ops.engines.onednn.binding import library
from dagexec.platform import cgroups, processor, system
from dagexec.platform.processor import available_cores, cpu_quota, instruction_set, processor_name


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A made-up tree of control groups; the process is in `/outer/inner` of version 2, and in `/one` of version 1."""
    membership = tmp_path / "membership"
    membership.write_text("0::/outer/inner\n4:cpu,cpuacct:/one\n5:memory:/two\n")
    monkeypatch.setattr(cgroups, "_ROOT", tmp_path / "groups")
    monkeypatch.setattr(cgroups, "_MEMBERSHIP", membership)
    monkeypatch.setattr(processor, "cpu_quota", cpu_quota.__wrapped__)
    (tmp_path / "groups" / "outer" / "inner").mkdir(parents=True)
    (tmp_path / "groups" / "cpu,cpuacct" / "one").mkdir(parents=True)
    return tmp_path / "groups"


def test_without_a_quota_the_cores_are_those_of_the_affinity(groups: Path) -> None:
    (groups / "outer" / "cpu.max").write_text("max 100000\n")
    assert processor.cpu_quota() == math.inf
    assert available_cores() == len(os.sched_getaffinity(0))


@pytest.mark.parametrize(("quota", "cores"), [("100000 100000", 1), ("150000 100000", 1), ("20000 100000", 1)])
def test_a_quota_of_the_group_around_bounds_the_cores(groups: Path, quota: str, cores: int) -> None:
    (groups / "outer" / "cpu.max").write_text(quota)
    (groups / "outer" / "inner" / "cpu.max").write_text("900000 100000")
    assert available_cores() == cores


def test_of_several_quotas_the_smallest_holds(groups: Path) -> None:
    (groups / "outer" / "cpu.max").write_text("500000 100000")
    (groups / "outer" / "inner" / "cpu.max").write_text("300000 100000")
    assert processor.cpu_quota() == 3.0


def test_a_quota_of_version_1_counts(groups: Path) -> None:
    (groups / "cpu,cpuacct" / "one" / "cpu.cfs_quota_us").write_text("250000")
    (groups / "cpu,cpuacct" / "one" / "cpu.cfs_period_us").write_text("100000")
    assert processor.cpu_quota() == 2.5


@pytest.mark.parametrize("content", ["", "max", "-1 100000", "100000 0", "many cores", "1 2 3"])
def test_a_file_that_says_no_quota_bounds_nothing(groups: Path, content: str) -> None:
    (groups / "outer" / "cpu.max").write_text(content)
    assert processor.cpu_quota() == math.inf


def test_without_control_groups_nothing_bounds_the_cores(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, groups: Path
) -> None:
    monkeypatch.setattr(cgroups, "_MEMBERSHIP", tmp_path / "absent")
    assert processor.cpu_quota() == math.inf


@pytest.mark.parametrize(
    ("bits", "name", "lanes", "bfloat16", "int8"),
    [
        (0x0, "plain", 1, False, False),
        (0x1, "SSE41", 4, False, False),
        (0x3, "AVX", 8, False, False),
        (0x7, "AVX2", 8, False, False),
        (0xF, "AVX2_VNNI", 8, False, True),
        (0x1F, "AVX2_VNNI_2", 8, True, True),
        (0x27, "AVX512_CORE", 16, False, False),
        (0x67, "AVX512_CORE_VNNI", 16, False, True),
        (0xE7, "AVX512_CORE_BF16", 16, True, True),
        (0x1EF, "AVX512_CORE_FP16", 16, True, True),
        (0xFEF, "AVX512_CORE_AMX", 16, True, True),
        (0x1FEF, "AVX512_CORE_AMX", 16, True, True),
    ],
)
def test_numbers_of_the_library_are_instruction_sets(
    bits: int, name: str, lanes: int, bfloat16: bool, int8: bool
) -> None:
    found = instruction_set(bits)
    assert (found.name, found.lanes, found.bfloat16, found.int8) == (name, lanes, bfloat16, int8)


SSE41, AVX = "sse4_1", "sse4_1 avx"
AVX2 = f"{AVX} avx2 fma"
AVX512 = f"{AVX2} avx512f avx512bw avx512dq avx512vl"


@pytest.fixture
def own_isa(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str, str], str]:
    """Name and lanes of what kernels of our own may use, by the flags of the processor and a limit."""

    def found(flags: str, limit: str = "") -> str:
        (tmp_path / "cpuinfo").write_text(f"processor : 0\nflags\t\t: fpu {flags} rdrand\nprocessor : 1\n")
        monkeypatch.setattr(system, "_PROCESSOR", tmp_path / "cpuinfo")
        monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", limit)
        isa = processor.own_instruction_set.__wrapped__()
        return f"{isa.name} {isa.lanes}"

    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    return found


@pytest.mark.parametrize(
    ("flags", "limit", "isa"),
    [
        ("", "", "plain 1"),
        (SSE41, "", "SSE41 4"),
        (AVX, "", "AVX 8"),
        (f"{AVX} avx2", "", "AVX 8"),  # its kernels multiply and add at once
        (AVX2, "", "AVX2 8"),
        (f"{AVX2} avx512f", "", "AVX2 8"),
        (AVX512, "", "AVX512_CORE 16"),
        (f"{AVX512} avx512_vnni avx512_bf16", "", "AVX512_CORE 16"),
        (AVX512, "AVX2", "AVX2 8"),
        (AVX512, "avx2", "AVX2 8"),
        (AVX512, "AVX512_CORE_AMX", "AVX512_CORE 16"),
        (AVX512, "ALL", "AVX512_CORE 16"),
        (AVX2, "AVX512_CORE", "AVX2 8"),
        (AVX512, "SSE41", "SSE41 4"),
    ],
)
def test_flags_of_the_processor_say_what_kernels_may_use(
    own_isa: Callable[[str, str], str], flags: str, limit: str, isa: str
) -> None:
    assert own_isa(flags, limit) == isa


@pytest.mark.parametrize("machine", ["aarch64", "arm64"])
def test_every_64_bit_arm_processor_has_neon(monkeypatch: pytest.MonkeyPatch, machine: str) -> None:
    monkeypatch.setattr(platform, "machine", lambda: machine)
    isa = processor.own_instruction_set.__wrapped__()
    assert (isa.name, isa.lanes) == ("NEON", 8)


@pytest.mark.parametrize(
    ("features", "isa"),
    [({"AVX2": True, "FMA3": True, "AVX": True, "SSE41": True}, "AVX2 8"), ({"X86_V3": True}, "AVX2 8"),
     ({"X86_V3": True, "X86_V4": True}, "AVX512_CORE 16"), ({"X86_V3": False, "SSE41": True}, "SSE41 4")],
)  # fmt: skip
def test_where_the_system_tells_no_flags_numpy_does(
    monkeypatch: pytest.MonkeyPatch, own_isa: Callable[[str, str], str], features: dict[str, bool], isa: str
) -> None:
    monkeypatch.setattr(processor.np, "_core", SimpleNamespace(_multiarray_umath=SimpleNamespace(
        __cpu_features__=features
    )))  # fmt: skip
    monkeypatch.setattr(processor, "processor_field", lambda what: "")
    assert own_isa("", "") == isa


@pytest.mark.slow
@pytest.mark.skipif(library() is None, reason="needs oneDNN")
@pytest.mark.parametrize("limit", ["SSE41", "AVX2", "AVX512_CORE"])
def test_kernels_of_our_own_may_use_as_much_as_the_library(limit: str) -> None:
    program = """
from dagexec.ops.engines.onednn.binding import library
from dagexec.platform.processor import own_instruction_set
print(library().isa.lanes, own_instruction_set().lanes)
"""
    environment = os.environ | {"ONEDNN_MAX_CPU_ISA": limit}
    told = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    its, ours = told.stdout.split()
    assert its == ours


@pytest.mark.slow
@pytest.mark.skipif(library() is None, reason="needs oneDNN")
@pytest.mark.parametrize(("limit", "lanes"), [("SSE41", 4), ("AVX2", 8)])
def test_the_instruction_set_in_effect_is_the_one_the_library_is_limited_to(limit: str, lanes: int) -> None:
    program = "from dagexec.ops.engines.onednn.binding import library; isa = library().isa; print(isa.name, isa.lanes)"
    environment = os.environ | {"ONEDNN_MAX_CPU_ISA": limit}
    told = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert told.stdout.split() == [limit, str(lanes)]


def test_a_key_tells_processors_of_one_name_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = set()
    for extension, blas in (("AVX512_SPR", ""), ("AVX2", ""), ("AVX2", "Haswell")):
        monkeypatch.setattr(processor, "numpy_instruction_set", lambda extension=extension: extension)
        monkeypatch.setenv("OPENBLAS_CORETYPE", blas)
        keys.add(processor.processor_key.__wrapped__())
    assert len(keys) == 3
    assert all(processor_name() in key for key in keys)


def test_caches_are_told_by_the_system_or_assumed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(system, "_CACHES", tmp_path)
    assert processor.last_level_cache.__wrapped__() == 32 << 20
    assert processor.core_cache.__wrapped__() == 1 << 20
    for index, (level, size) in enumerate([("1", "32K"), ("2", "512K"), ("3", "16M"), ("4", "unknown")]):
        (tmp_path / f"index{index}").mkdir()
        (tmp_path / f"index{index}" / "level").write_text(level)
        (tmp_path / f"index{index}" / "size").write_text(size)
    assert processor.last_level_cache.__wrapped__() == 16 << 20
    assert processor.core_cache.__wrapped__() == 512 << 10


def test_ways_of_the_cache_for_data_are_told_by_the_system_or_assumed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(system, "_CACHES", tmp_path)
    assert processor.nearest_cache_ways.__wrapped__() == 8
    kinds = [("1", "Instruction", "16"), ("1", "Data", "unknown"), ("1", "Data", "12"), ("2", "Unified", "4")]
    for index, (level, kind, ways) in enumerate(kinds):
        (tmp_path / f"index{index}").mkdir()
        for name, text in (("level", level), ("type", kind), ("ways_of_associativity", ways), ("size", "32K")):
            (tmp_path / f"index{index}" / name).write_text(f"{text}\n")
    assert processor.nearest_cache_ways.__wrapped__() == 12


@pytest.mark.parametrize(
    ("cpuinfo", "name"),
    [
        ("processor\t: 0\nmodel name\t: Fast: CPU 9\n\nprocessor\t: 1\nmodel name\t: Other\n", "Fast: CPU 9"),
        ("processor\t: 0\nBogoMIPS\t: 50\n", "machine"),
        (None, "machine"),
    ],
)
def test_the_processor_is_named_by_the_system_or_by_its_architecture(
    monkeypatch: pytest.MonkeyPatch, cpuinfo: str | None, name: str
) -> None:
    def read_text(path: Path) -> str:
        assert path == Path("/proc/cpuinfo")
        if cpuinfo is None:
            raise FileNotFoundError(path)
        return cpuinfo

    monkeypatch.setattr(Path, "read_text", read_text)
    monkeypatch.setattr("platform.processor", lambda: "")
    monkeypatch.setattr("platform.machine", lambda: "machine")
    assert processor_name.__wrapped__() == name
