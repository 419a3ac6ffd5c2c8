"""Compiled kernels are kept (`dagexec.devices.cuda.compilation`). What NVRTC is asked is tested with the real one."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from dagexec.devices.cuda.binding import cupy, installed
from dagexec.devices.cuda.compilation import compile_target, compiled_binary, kernel_file, loaded_kernel
from dagexec.devices.cuda.kernels import compiled
from dagexec.errors import DeviceError
from tests.cuda.emulated import emulated
from tests.cuda.nvrtc import nvrtc

SOURCE = 'extern "C" __global__ void k(float* x) { x[0] = x[0] * x[1] + 1.0f / x[2]; }'


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    found = tmp_path / "made" / "kernels"
    monkeypatch.setenv("DAGEXEC_KERNELS", str(found))
    return found


def count_compilations(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    module, programs = cupy().cuda.nvrtc, list[int]()
    compile_program = module.compileProgram

    def counted(program: int, options: Any) -> None:
        programs.append(program)
        compile_program(program, options)

    monkeypatch.setattr(module, "compileProgram", counted)
    return programs


def test_a_kernel_is_compiled_once_and_then_read_from_the_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with emulated(record=False):
        made = count_compilations(monkeypatch)
        assert loaded_kernel("k", SOURCE, 0).ptr
        (file,) = folder.iterdir()
        assert file == kernel_file(SOURCE, compile_target(90))
        assert loaded_kernel("k", SOURCE, 1).ptr
        assert len(made) == 1
        assert kernel_file(SOURCE, "-arch=sm_80") != file != kernel_file(SOURCE + " ", "-arch=sm_90")


def test_a_damaged_file_is_compiled_anew_and_replaced(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with emulated(record=False), caplog.at_level(logging.WARNING):
        assert loaded_kernel("k", SOURCE, 0).ptr
        (file,) = folder.iterdir()
        whole = file.read_bytes()
        file.write_bytes(whole[:20])
        assert loaded_kernel("k", SOURCE, 0).ptr
        assert file.read_bytes() == whole
    assert str(file) in caplog.text


def test_without_a_folder_that_can_be_written_to_kernels_are_compiled_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    with emulated(record=False):
        for named in (str(tmp_path / "file" / "kernels"), "null\0character", "off"):
            if "\0" in named:
                monkeypatch.setattr("dagexec.devices.cuda.compilation.os.environ", {"DAGEXEC_KERNELS": named})
            else:
                monkeypatch.setenv("DAGEXEC_KERNELS", named)
            made = count_compilations(monkeypatch)
            assert loaded_kernel("k", SOURCE, 0).ptr
            assert loaded_kernel("k", SOURCE, 0).ptr
            assert len(made) == 2
    assert [file.name for file in tmp_path.iterdir()] == ["file"]


def test_the_folder_is_the_users_cache_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DAGEXEC_KERNELS")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with emulated(record=False):
        file = kernel_file(SOURCE, "-arch=sm_90")
    assert file is not None
    assert file.parent == tmp_path / "dagexec" / "kernels"


def test_an_error_names_the_kernel_and_has_what_the_compiler_says() -> None:
    with emulated(record=False), pytest.raises(DeviceError, match=r"(?s)'k' does not compile for cuda:0.*no_such_fu"):
        compiled("k", 'extern "C" __global__ void k() { no_such_function(); }', 0)


def test_a_device_that_nvrtc_does_not_know_gets_ptx_for_the_latest_before_it() -> None:
    with emulated(record=False):
        assert compile_target(90) == "-arch=sm_90"
        assert compile_target(86) == "-arch=compute_80"
        with pytest.raises(DeviceError, match="from 75 on; the device has 70"):
            compile_target(70)


@pytest.mark.skipif(nvrtc() is None, reason="CuPy or NVRTC is not installed; make cuda-check installs them")
def test_nvrtc_is_asked_for_machine_code_or_ptx_and_to_keep_numbers_below_the_normal_ones() -> None:
    import importlib

    with installed(cupy=importlib.import_module("cupy")):
        assert compiled_binary(SOURCE, "-arch=sm_90").startswith(b"\x7fELF")
        ptx = compiled_binary(SOURCE, "-arch=compute_90").decode()
        assert "rn.f32" in ptx
        assert ".ftz" not in ptx
        with pytest.raises(DeviceError, match="no_such_function"):
            compiled_binary('extern "C" __global__ void k() { no_such_function(); }', "-arch=sm_90")
