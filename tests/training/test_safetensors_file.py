from __future__ import annotations

import json
import resource
import struct
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import load_file, save_file

from dagexec import Workspace
from dagexec.errors import OutputError, StorageError
from dagexec.training.safetensors_file import export_safetensors, import_safetensors, read_safetensors

Array = npt.NDArray[Any]
KINDS = [
    np.float64, np.float32, np.float16, ml_dtypes.bfloat16, np.int64, np.int32, np.int16, np.int8, np.uint16, np.uint8,
    np.bool_,
]  # fmt: skip


def arrays() -> dict[str, Array]:
    found = {np.dtype(kind).name: np.arange(6).reshape(2, 3).astype(kind) for kind in KINDS}
    return found | {"scalar": np.array(2.5), "empty": np.zeros((0, 3), np.float32)}


def filled(values: dict[str, Array]) -> Workspace:
    workspace = Workspace()
    for name, array in values.items():
        workspace.feed_blob(name, array)
    return workspace


def test_parameters_of_every_type_come_back(tmp_path: Path) -> None:
    values = arrays()
    export_safetensors(filled(values), list(values), tmp_path / "p.safetensors", metadata={"made by": "a test"})
    other = filled({name: np.zeros_like(array) for name, array in values.items()})
    assert import_safetensors(other, list(values), tmp_path / "p.safetensors") == list(values)
    for name, array in values.items():
        found = other.fetch_blob(name)
        assert (found.dtype, found.shape, found.tobytes()) == (array.dtype, array.shape, array.tobytes()), name
    content = (tmp_path / "p.safetensors").read_bytes()
    header = json.loads(content[8 : 8 + struct.unpack("<Q", content[:8])[0]])
    assert header["__metadata__"] == {"made by": "a test"}
    assert header["bfloat16"]["dtype"] == "BF16"


def test_the_formats_own_library_reads_what_is_written_and_the_other_way_round(tmp_path: Path) -> None:
    values = {name: array for name, array in arrays().items() if name != "bfloat16"}
    export_safetensors(filled(values), list(values), tmp_path / "ours")
    for name, array in load_file(tmp_path / "ours").items():
        np.testing.assert_array_equal(array, values[name])
    save_file(values, tmp_path / "theirs")
    for name, array in read_safetensors(tmp_path / "theirs").items():
        np.testing.assert_array_equal(array, values[name])


def test_what_does_not_fit_the_model_is_listed_and_nothing_is_fed(tmp_path: Path) -> None:
    save_file({"w": np.ones((2, 3), np.float32), "v": np.ones(2, np.float32), "x": np.ones(1)}, tmp_path / "f")
    workspace = filled({"w": np.zeros((3, 2), np.float32), "v": np.zeros(2), "b": np.zeros(1)})
    with pytest.raises(StorageError) as caught:
        import_safetensors(workspace, ["w", "v", "b"], tmp_path / "f")
    for problem in (
        "'b' is missing",
        "'x' is no parameter of the model",
        "'w' must be float32[3, 2], found float32[2, 3]",
        "'v' must be float64[2], found float32[2]",
    ):
        assert problem in str(caught.value)
    assert not workspace.fetch_blob("w").any()


def test_without_strict_what_both_sides_have_is_loaded(tmp_path: Path) -> None:
    save_file({"w": np.ones(2), "x": np.ones(1)}, tmp_path / "f")
    workspace = filled({"w": np.zeros(2), "b": np.zeros(1)})
    assert import_safetensors(workspace, ["w", "b"], tmp_path / "f", strict=False) == ["w"]
    assert workspace.fetch_blob("w").tolist() == [1, 1]
    assert workspace.fetch_blob("b").tolist() == [0]


@pytest.mark.parametrize(
    "content",
    [b"", b"\xff" * 8, struct.pack("<Q", 1 << 60) + b"{}", struct.pack("<Q", 2) + b"[]", struct.pack("<Q", 3) + b"{}"],
)
def test_a_damaged_file_is_named(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(content)
    with pytest.raises(StorageError, match=f"{tmp_path / 'f'}: not a safetensors file"):
        read_safetensors(tmp_path / "f")


def test_a_missing_file_strings_and_an_empty_blob_are_errors(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="No such file"):
        read_safetensors(tmp_path / "none")
    with pytest.raises(StorageError, match="'s' holds strings"):
        export_safetensors(filled({"s": np.array([b"a"], object)}), ["s"], tmp_path / "f")
    save_file({"w": np.ones(2)}, tmp_path / "f")
    workspace = Workspace()
    workspace.create_blob("w").tensor()
    with pytest.raises(StorageError, match="run the init net first"):
        import_safetensors(workspace, ["w"], tmp_path / "f")


def test_a_full_disk_leaves_the_file_before(tmp_path: Path) -> None:
    export_safetensors(filled({"w": np.ones(2)}), ["w"], tmp_path / "f")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, before[1]))
    try:
        with pytest.raises(OutputError, match="cannot be written"):
            export_safetensors(filled({"w": np.ones(1 << 16)}), ["w"], tmp_path / "f")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [path.name for path in tmp_path.iterdir()] == ["f"]
    assert read_safetensors(tmp_path / "f")["w"].tolist() == [1, 1]


def test_a_missing_module_is_answered_with_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(StorageError, match="pip install 'safetensors>="):
        read_safetensors(tmp_path / "f")


def test_any_byte_but_zero_is_true(tmp_path: Path) -> None:
    header = b'{"w":{"dtype":"BOOL","shape":[3],"data_offsets":[0,3]}}'
    (tmp_path / "f").write_bytes(len(header).to_bytes(8, "little") + header + b"\x02\x00\x01")
    [array] = read_safetensors(tmp_path / "f").values()
    assert array.view(np.uint8).tolist() == [1, 0, 1]


def test_metadata_that_is_no_text_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    workspace = Workspace()
    workspace.feed_blob("w", np.zeros(2))
    with pytest.raises(StorageError, match=r"f: cannot be written: .*'int'"):
        export_safetensors(workspace, ["w"], tmp_path / "f", metadata={"step": 3})  # type: ignore[dict-item]
    assert list(tmp_path.iterdir()) == []
