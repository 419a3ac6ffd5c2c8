from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import PIL.Image
import pytest

from dagexec.caffe2 import brew, core, model_helper, workspace
from dagexec.caffe2.proto import caffe2_pb2


@pytest.mark.parametrize("order", ["NCHW", "NHWC"])
def test_brew_reads_images_from_a_database(order: str, tmp_path: Path) -> None:
    workspace.ResetWorkspace()
    image = np.random.default_rng(0).integers(0, 256, (4, 4, 3)).astype(np.uint8)
    file = io.BytesIO()
    PIL.Image.fromarray(image).save(file, "PNG")
    record = caffe2_pb2.TensorProtos()
    record.protos.add(data_type=core.DataType.STRING, string_data=[file.getvalue()], dims=[1])
    record.protos.add(data_type=core.DataType.INT32, int32_data=[3], dims=[1])
    database = core.C.create_db("minidb", str(tmp_path / "db"), core.C.Mode.write)
    transaction = database.new_transaction()
    transaction.put("0", record.SerializeToString())
    del transaction, database
    model = model_helper.ModelHelper("reads")
    reader = model.CreateDB("reader", db=str(tmp_path / "db"), db_type="minidb")
    with pytest.raises(ValueError, match="is_test"):
        brew.image_input(model, reader, ["data", "label"], batch_size=1, scale=4, crop=4)
    data, _ = brew.image_input(
        model, [reader], ["data", "label"], order=order, batch_size=2, scale=4, crop=4, is_test=True, mean=1.0
    )
    assert str(data) == "data"
    workspace.RunNetOnce(model.param_init_net)
    workspace.RunNetOnce(model.net)
    found = workspace.FetchBlob("data")
    expected = image[:, :, ::-1].astype(np.float32) - 1
    np.testing.assert_array_equal(found[1], expected.transpose(2, 0, 1) if order == "NCHW" else expected)
    assert workspace.FetchBlob("label").tolist() == [3, 3]
