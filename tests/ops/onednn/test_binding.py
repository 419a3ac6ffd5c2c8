"""Finding and loading oneDNN: absent, switched off, damaged, too old, of other threading; and its errors."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dagexec.core.operator_def import op
from dagexec.core.registry import create_operator
from dagexec.errors import DagexecError, DeviceError, ResourceError, UnsupportedFeatureError
from dagexec.ops.engines.onednn import binding
from dagexec.ops.engines.onednn.binding import Library, library, load, own_kernels
from dagexec.ops.engines.onednn.convolution_family import ConvolutionFamily
from tests.ops.onednn import declarations
from tests.ops.onednn.test_conv import SQUARE, Layer
from tests.ops.running import run_operator, workspace_of

needs_kernels = pytest.mark.skipif(own_kernels() is None, reason="no kernels run here")
has_onednn = pytest.mark.skipif(library() is None, reason="oneDNN is not installed")


@pytest.fixture
def searching() -> Iterator[None]:
    """Forget what was found before the test, and again after it."""
    found = list(binding._found)
    binding._found.clear()
    yield
    binding._found[:] = found


def run_layer(engine: str) -> bytes:
    layer = Layer(SQUARE)
    (y,) = run_operator("Conv", list(layer.fed("NHWC")), engine=engine, **layer.arguments("NHWC"))
    return bytes(y.tobytes())


CHILD = """
import logging, os, sys
import numpy as np
logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
from tests.ops.onednn.test_binding import run_layer
engine, usual = run_layer("ONEDNN"), run_layer("")
assert os.environ["DAGEXEC_OWN_KERNELS"] != "off" or engine == usual
np.testing.assert_allclose(np.frombuffer(engine, np.float32), np.frombuffer(usual, np.float32), atol=2e-4)
"""


def child(setting: str, kernels: str = "") -> list[str]:
    """What a process logs of oneDNN that convolves with engine ONEDNN and without; the results are the same."""
    done = subprocess.run(
        [sys.executable, "-c", CHILD],
        env={**os.environ, "DAGEXEC_ONEDNN": setting, "DAGEXEC_OWN_KERNELS": kernels, "DAGEXEC_CHOICES": "off"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return [line for line in done.stderr.splitlines() if line.startswith("oneDNN is not available")]


@pytest.mark.slow
def test_switched_off_numpy_computes_and_one_line_says_so() -> None:
    assert child("off", "off") == ["oneDNN is not available, NumPy computes: it is switched off"]


@pytest.mark.slow
@needs_kernels
def test_switched_off_our_own_kernels_compute_and_one_line_says_so() -> None:
    assert child("off") == ["oneDNN is not available, our own kernels compute: it is switched off"]


@pytest.mark.slow
def test_a_damaged_library_is_named_and_numpy_computes(tmp_path: Path) -> None:
    path = tmp_path / "libdnnl.so.3"
    path.write_bytes(b"\x7fELF" + b"\0" * 100)
    (line,) = child(str(path), "off")
    assert f"oneDNN is not available, NumPy computes: {path}: " in line


def test_a_path_that_is_not_there_is_named(
    searching: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("DAGEXEC_ONEDNN", str(tmp_path / "nothing.so"))
    with caplog.at_level(logging.INFO, "dagexec"):
        assert library() is None
        assert library() is None
        workspace = workspace_of({"x": np.ones(3, np.float32)})
        monkeypatch.setattr("dagexec.ops.engines.onednn.binding.own_kernels", lambda: None)
        create_operator(op("Relu", "x", "y", engine="ONEDNN"), workspace)
    assert len([line for line in caplog.messages if "nothing.so" in line]) == 1
    assert "Relu 'y': oneDNN is not available; install it with" in caplog.text


class FakeLibrary:
    """A library of some version and threading, whose engine is made or not."""

    def __init__(self, version: tuple[int, int, int], runtime: int = 2, engine: int = 0) -> None:
        self._version = SimpleNamespace(
            major=version[0], minor=version[1], patch=version[2], cpu_runtime=runtime, gpu_runtime=0
        )
        self._engine = engine

    def dnnl_version(self) -> Any:
        return self._version

    def dnnl_engine_create(self, _engine: Any, _kind: int, _index: int) -> int:
        return self._engine


FAKES = {
    "too old": (FakeLibrary((2, 7, 1)), r"oneDNN 2\.7\.1; 3\.1 or a newer 3\.x is needed"),
    "a little too old": (FakeLibrary((3, 0, 0)), r"oneDNN 3\.0\.0; 3\.1 or a newer 3\.x is needed"),
    "another interface": (FakeLibrary((4, 0, 0)), r"oneDNN 4\.0\.0; 3\.1 or a newer 3\.x is needed"),
    "SYCL": (FakeLibrary((3, 13, 2), 512), r"oneDNN 3\.13\.2 is built for SYCL; expected one thread, OpenMP, TBB"),
    "unknown threading": (FakeLibrary((3, 5, 0), 77), r"oneDNN 3\.5\.0 is built for runtime 77"),
    "no engine": (FakeLibrary((3, 5, 0), 2, 4), r"oneDNN 3\.5\.0 has no CPU engine here"),
    "something else": (SimpleNamespace(), "dnnl_version"),
}


@pytest.mark.parametrize(("fake", "message"), FAKES.values(), ids=FAKES)
def test_a_library_that_does_not_do_is_refused_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, fake: Any, message: str
) -> None:
    ffi = SimpleNamespace(dlopen=lambda _path: fake, new=lambda _kind, _value=None: [None], error=AttributeError)
    monkeypatch.setattr(binding, "_ffi", lambda: ffi)
    with pytest.raises(DeviceError, match=f"some/path: .*{message}"):
        load("some/path")


def test_what_cffi_made_of_the_declarations_is_what_it_makes_of_them_now(tmp_path: Path) -> None:
    pytest.importorskip("cffi")
    declarations.write(tmp_path)
    written = (declarations.FOLDER / declarations.MODULE).read_text()
    assert (tmp_path / declarations.MODULE).read_text() == written


def test_without_cffi_the_reason_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent() -> Any:
        raise ImportError

    monkeypatch.setattr(binding, "_ffi", absent)
    with pytest.raises(DeviceError, match="the package cffi is not installed"):
        load("some/path")


@pytest.mark.parametrize(
    ("status", "error", "message"),
    [
        (1, ResourceError, "Conv 'y': oneDNN 3.1.0 is out of memory"),
        (2, UnsupportedFeatureError, "Conv 'y': oneDNN 3.1.0 does not accept these arguments"),
        (3, UnsupportedFeatureError, "Conv 'y': oneDNN 3.1.0 has no implementation"),
        (5, DagexecError, "Conv 'y': oneDNN 3.1.0"),
    ],
)
def test_the_librarys_errors_become_ours(status: int, error: type[DagexecError], message: str) -> None:
    found = Library("path", (3, 1, 0), 0, None, None, None, None)
    found.check(0, "Conv 'y'")
    with pytest.raises(error, match=message):
        found.check(status, "Conv 'y'")


@has_onednn
def test_out_of_memory_at_preparation_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_self: Any, *_arguments: Any) -> Any:
        raise ResourceError("Conv 'y0': working memory of 1 bytes: this machine has none")

    monkeypatch.setattr(ConvolutionFamily, "parameter", full)
    layer = Layer(SQUARE)
    with pytest.raises(ResourceError, match=r"Conv 'y0'.*this machine has none"):
        run_operator("Conv", list(layer.fed("NHWC")), engine="ONEDNN", **layer.arguments("NHWC"))


@has_onednn
def test_primitives_have_one_thread_of_the_openmp_that_the_library_uses() -> None:
    found = library()
    assert found is not None
    if found.openmp is None:
        pytest.skip("the library has other threading")
    found.openmp.omp_set_num_threads(2)
    found.use_one_thread()
    assert found.openmp.omp_get_max_threads() == 1


@has_onednn
def test_numbers_of_the_headers_are_right() -> None:
    """A convolution of known numbers: the constants of the binding are those of the library."""
    x, weights = np.arange(9, dtype=np.float32).reshape(1, 1, 3, 3), np.ones((1, 1, 2, 2), np.float32)
    (y,) = run_operator("FusedConv", [x, weights], engine="ONEDNN", kernel=2, post_ops=["linear:2.0:1.0", "square"])
    np.testing.assert_array_equal(y, [[[[17**2, 25**2], [41**2, 49**2]]]])
