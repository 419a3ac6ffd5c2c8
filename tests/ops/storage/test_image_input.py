from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import PIL.Image
import pytest

from dagexec import NetDef, Workspace, op
from dagexec.core.arguments import ArgumentValue
from dagexec.core.proto import TensorProto, TensorProtos
from dagexec.errors import DagexecError
from dagexec.storage import Mode, open_database
from dagexec.storage.wire import length_field, varint

Array = npt.NDArray[Any]
IMAGES = np.random.default_rng(1).integers(0, 256, (4, 6, 8, 3)).astype(np.uint8)
"""Red, green, blue."""


def png(image: Array) -> bytes:
    file = io.BytesIO()
    PIL.Image.fromarray(image).save(file, "PNG")
    return file.getvalue()


def encoded(image: bytes | Array, *others: TensorProto) -> bytes:
    if isinstance(image, bytes):
        first = TensorProto(data_type=TensorProto.STRING, string_data=[image], dims=[1])
    else:
        first = TensorProto(data_type=TensorProto.BYTE, byte_data=image.tobytes(), dims=image.shape)
    return TensorProtos(protos=[first, *others]).SerializeToString()


def ints(*values: int) -> TensorProto:
    return TensorProto(data_type=TensorProto.INT32, int32_data=values, dims=[len(values)])


def floats(*values: float) -> TensorProto:
    return TensorProto(data_type=TensorProto.FLOAT, float_data=values, dims=[len(values)])


def read(
    folder: Path, records: list[bytes], *, runs: int = 1, seed: int = 7, others: int = 0, db_type: str = "minidb",
    **arguments: ArgumentValue,
) -> list[list[Array]]:  # fmt: skip
    """What the first runs give for these records."""
    with open_database(db_type, folder / "db", Mode.NEW) as database, database.transaction() as transaction:
        for index, record in enumerate(records):
            transaction.put(f"{index:04}".encode(), record)
    workspace = Workspace(root_folder=folder, allow_io=True)
    workspace.run_operator_once(op("CreateDB", [], ["reader"], db="db", db_type=db_type))
    outputs = ["x", "label", *(f"other{index}" for index in range(others))]
    definition = op("ImageInput", ["reader"], outputs, **{"batch_size": 2, "crop": 6, **arguments})
    definition.device_option.random_seed = seed
    net = workspace.create_net(NetDef(name="net", op=[definition]), "dag")
    found = []
    for _ in range(runs):
        net.run()
        found.append([workspace.fetch_blob(name) for name in outputs])
    return found


@pytest.mark.parametrize("db_type", ["minidb", "lmdb"])
def test_images_are_blue_green_red_cropped_and_normalized(db_type: str, tmp_path: Path) -> None:
    records = [encoded(png(image), ints(index)) for index, image in enumerate(IMAGES)]
    arguments = {"scale": 6, "is_test": 1, "mean_per_channel": [1.0, 2.0, 3.0], "std": 2.0}
    for turn, (x, label) in enumerate(read(tmp_path, records, runs=3, db_type=db_type, **arguments)):
        rows = np.array([0, 1]) + 2 * (turn % 2)
        assert label.dtype == np.int32
        assert label.tolist() == rows.tolist()
        expected = (IMAGES[rows][:, :, 1:7, ::-1].astype(np.float32) - [1, 2, 3]) / 2
        assert x.dtype == np.float32
        np.testing.assert_array_equal(x, expected.astype(np.float32))


def test_in_training_the_seed_decides_what_is_cut_and_mirrored(tmp_path: Path) -> None:
    records = [encoded(np.ascontiguousarray(image[:, :, ::-1]), ints(0)) for image in IMAGES]
    arguments: dict[str, Any] = {"scale": 6, "crop": 4, "mirror": 1, "runs": 8}
    first = np.concatenate([x for x, _ in read(tmp_path, records, **arguments)])
    again = np.concatenate([x for x, _ in read(tmp_path, records, **arguments, prefetch=0)])
    other = np.concatenate([x for x, _ in read(tmp_path, records, **arguments, seed=8)])
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()
    places = set()
    for index, cut in enumerate(first):
        image = IMAGES[index % 4][:, :, ::-1]
        found = [
            (top, left, step)
            for top in range(3)
            for left in range(5)
            for step in (1, -1)
            if (image[top : top + 4, left : left + 4][:, ::step] == cut).all()
        ]
        assert len(found) == 1
        places.update(found)
    assert {step for *_, step in places} == {1, -1}
    assert len(places) > 8


def test_sizes_colors_and_kinds_of_records(tmp_path: Path) -> None:
    large = np.repeat(np.repeat(IMAGES[0], 2, axis=0), 2, axis=1)
    common: dict[str, Any] = {"is_test": 1, "batch_size": 1}
    ((x, _),) = read(tmp_path, [encoded(png(large), ints(0))], scale=6, **common)
    np.testing.assert_array_equal(x[0], IMAGES[0][:, 1:7, ::-1])
    ((x, _),) = read(tmp_path, [encoded(png(large), ints(0))], minsize=12, crop=12, **common)
    np.testing.assert_array_equal(x[0], large[:, 2:14, ::-1])
    ((x, _),) = read(tmp_path, [encoded(png(np.full((3, 5, 3), 9, np.uint8)), ints(0))], scale=6, warp=1, **common)
    assert (x == 9).all()
    ((x, _),) = read(tmp_path, [encoded(png(IMAGES[0]), ints(0))], random_scale=[7, 9], crop=7, batch_size=1)[:1]
    assert x.shape == (1, 7, 7, 3)
    ((x, _),) = read(tmp_path, [encoded(png(IMAGES[0]), ints(0))], scale=6, color=0, **common)
    gray = IMAGES[0][:, 1:7] @ np.array([0.299, 0.587, 0.114])
    assert x.shape == (1, 6, 6, 1)
    assert np.abs(x[0, :, :, 0] - gray).max() <= 1
    ((x, _),) = read(tmp_path, [encoded(IMAGES[0], ints(0))], scale=6, color=0, **common)
    assert np.abs(x[0, :, :, 0] - IMAGES[0][:, 1:7] @ np.array([0.114, 0.587, 0.299])).max() <= 0.5
    options = {"use_gpu_transform": 1, "output_type": "float16"}
    ((x, _),) = read(tmp_path, [encoded(png(IMAGES[0]), ints(0), ints(0, 1, 6, 6))], scale=6, **options, **common)
    assert x.dtype == np.float16
    np.testing.assert_array_equal(x[0], IMAGES[0][:, 1:7, ::-1].transpose(2, 0, 1))


def test_labels_and_other_outputs(tmp_path: Path) -> None:
    common: dict[str, Any] = {"scale": 6, "is_test": 1, "batch_size": 1}
    image = png(IMAGES[0])
    for kind, protos, expected in (
        (1, [ints(0, 3)], [1, 0, 0, 1]),
        (2, [ints(4, 5, 6, 7)], [4, 5, 6, 7]),
        (3, [ints(2, 0), floats(0.5, 2)], [2, 0, 0.5, 0]),
    ):
        ((_, label),) = read(tmp_path, [encoded(image, *protos)], label_type=kind, num_labels=4, **common)
        assert label.tolist() == [expected]
    record = encoded(image, floats(0.5), ints(1, 2), floats(3))
    ((_, label, one, two),) = read(tmp_path, [record], others=2, output_sizes=[2, 1], **common)
    assert (label.tolist(), one.tolist(), two.tolist()) == ([0.5], [[1, 2]], [[3]])
    pixels = IMAGES[0][:, :, ::-1].transpose(2, 0, 1)
    sizes = b"".join(varint(number << 3) + varint(size) for number, size in ((1, 3), (2, 6), (3, 8), (5, 77)))
    raw = sizes + length_field(4, pixels.tobytes())
    of_file = varint(5 << 3) + varint(78) + varint(7 << 3) + varint(1) + length_field(4, image)
    ((x, label),) = read(tmp_path, [raw, of_file], use_caffe_datum=1, **{**common, "batch_size": 2})
    assert (label.dtype, label.tolist()) == (np.int32, [77, 78])
    np.testing.assert_array_equal(x, np.stack([IMAGES[0][:, 1:7, ::-1]] * 2))


@pytest.mark.parametrize(
    ("record", "arguments", "said"),
    [
        (encoded(b"no image", ints(0)), {"scale": 6}, "record b'0000': the image cannot be decoded"),
        (encoded(png(IMAGES[0])), {"scale": 6}, "expected 2 tensors, or one more with a box; found 1"),
        (encoded(png(IMAGES[0]), ints(0, 1)), {"scale": 6}, "expected 1 numbers as the label"),
        (encoded(png(IMAGES[0]), ints(9)), {"scale": 6, "label_type": 1, "num_labels": 4}, "classes below 4"),
        (encoded(png(IMAGES[0]), ints(0)), {"scale": 6, "crop": 7}, "a crop of at most"),
        (encoded(png(IMAGES[0]), ints(0)), {"scale": 6, "minsize": 6}, "either scale, minsize or random_scale"),
        (encoded(png(IMAGES[0]), ints(0)), {"scale": 6, "color_jitter": 1}, "'color_jitter' is not there"),
        (encoded(png(IMAGES[0]), ints(0)), {"scale": 6, "std": 0.0}, "'std_per_channel'"),
        (b"\xff", {"scale": 6}, "record b'0000'"),
        (b"\xff", {"scale": 6, "use_caffe_datum": 1}, "not a Datum"),
    ],
    ids=range(10),
)
def test_what_does_not_fit_is_refused(
    record: bytes, arguments: dict[str, ArgumentValue], said: str, tmp_path: Path
) -> None:
    with pytest.raises(DagexecError, match=said):
        read(tmp_path, [record], **{"batch_size": 1, **arguments})


def test_without_pillow_the_error_says_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = encoded(png(IMAGES[0]), ints(0))
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(DagexecError, match=r"needs Pillow; install it with: .*'?pillow>="):
        read(tmp_path, [record], scale=6, batch_size=1)
