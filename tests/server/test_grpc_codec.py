"""Messages of gRPC against those that tritonclient generates from the protocol's own description."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from tritonclient.grpc import service_pb2 as theirs

from dagexec.server.grpc_codec import request_from, response_message
from dagexec.server.inference import InferenceRequest, InferenceResponse, RequestError
from dagexec.server.limits import Limits
from dagexec.server.proto import inference_pb2 as ours

TYPED: dict[str, tuple[str, list[Any], Any]] = {
    "BOOL": ("bool_contents", [True, False], np.bool_),
    "INT8": ("int_contents", [-128, 127], np.int8),
    "INT16": ("int_contents", [-32768, 32767], np.int16),
    "INT32": ("int_contents", [-(2**31), 2**31 - 1], np.int32),
    "INT64": ("int64_contents", [-(2**63), 2**63 - 1], np.int64),
    "UINT8": ("uint_contents", [0, 255], np.uint8),
    "UINT16": ("uint_contents", [0, 65535], np.uint16),
    "UINT32": ("uint_contents", [0, 2**32 - 1], np.uint32),
    "UINT64": ("uint64_contents", [0, 2**64 - 1], np.uint64),
    "FP32": ("fp32_contents", [0.1, -1e30], np.float32),
    "FP64": ("fp64_contents", [0.1, -1e300], np.float64),
    "BYTES": ("bytes_contents", [b"", b"\x00\xff"], np.object_),
}


def read(message: theirs.ModelInferRequest) -> InferenceRequest:
    return request_from(ours.ModelInferRequest.FromString(message.SerializeToString()), Limits(tensors=2))


def one_input(datatype: str, shape: list[int], **contents: Any) -> theirs.ModelInferRequest:
    message = theirs.ModelInferRequest(model_name="m")
    message.inputs.add(name="x", datatype=datatype, shape=shape, contents=theirs.InferTensorContents(**contents))
    return message


def raw(datatype: str, shape: list[int], data: bytes) -> theirs.ModelInferRequest:
    message = theirs.ModelInferRequest(model_name="m", raw_input_contents=[data])
    message.inputs.add(name="x", datatype=datatype, shape=shape)
    return message


@pytest.mark.parametrize("datatype", TYPED)
def test_typed_contents_are_the_array(datatype: str) -> None:
    field, values, dtype = TYPED[datatype]
    x = read(one_input(datatype, [1, 2], **{field: values})).inputs["x"]
    assert x.dtype == dtype
    assert x.tolist() == np.array([values], dtype).tolist()


@pytest.mark.parametrize(
    "dtype", [np.int16, np.uint64, np.float16, np.float32, ml_dtypes.bfloat16], ids=lambda dtype: np.dtype(dtype).name
)
def test_raw_contents_are_the_array_without_a_copy(dtype: Any) -> None:
    names = {"int16": "INT16", "uint64": "UINT64", "float16": "FP16", "float32": "FP32", "bfloat16": "BF16"}
    values = np.arange(6).astype(dtype).reshape(2, 3)
    x = read(raw(names[np.dtype(dtype).name], [2, 3], values.tobytes())).inputs["x"]
    assert x.dtype == dtype
    assert x.tobytes() == values.tobytes()
    assert x.shape == (2, 3)
    assert not x.flags.owndata


def test_any_byte_but_zero_is_true() -> None:
    x = read(raw("BOOL", [3], b"\x00\x01\x02")).inputs["x"]
    assert x.view(np.uint8).tolist() == [0, 1, 1]


def test_everything_else_of_a_request_is_read() -> None:
    message = raw("UINT8", [1], b"\x07")
    message.model_version = "3"
    message.id = "an id"
    message.outputs.add(name="y").parameters["other"].int64_param = 3
    message.parameters["priority"].uint64_param = 2
    message.parameters["flag"].bool_param = False
    message.parameters["empty"].SetInParent()
    request = read(message)
    assert (request.model, request.version, request.id, request.outputs) == ("m", "3", "an id", ("y",))
    assert request.parameters == {"priority": 2, "flag": False}
    assert read(raw("UINT8", [1], b"\x07")).version is None


@pytest.mark.parametrize("dtype", [np.bool_, np.int8, np.float16, np.float64, ml_dtypes.bfloat16, np.object_])
def test_a_response_is_what_clients_read(dtype: Any) -> None:
    y = np.array([[b"one", b""], [b"\x00", b"four"]], np.object_) if dtype is np.object_ else np.eye(2).astype(dtype)
    response = InferenceResponse(model="m", version="1", id="an id", outputs={"y": y.T, "z": np.zeros((), np.int64)})
    message = theirs.ModelInferResponse.FromString(response_message(response).SerializeToString())
    assert (message.model_name, message.model_version, message.id) == ("m", "1", "an id")
    assert [(one.name, list(one.shape)) for one in message.outputs] == [("y", [2, 2]), ("z", [])]
    if dtype is np.object_:
        assert message.raw_output_contents[0] == b"\x03\0\0\0one\x01\0\0\0\0\0\0\0\0\x04\0\0\0four"
    else:
        assert message.raw_output_contents[0] == y.T.tobytes()


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (raw("FP32", [2], b"1234"), r"4 bytes; FP32 of shape \[2\] has 8"),
        (raw("FP32", [-1], b"1234"), "sizes are from 0"),
        (raw("FP32", [-1, -1], b"1234"), "sizes are from 0"),
        (raw("FP32", [2**40, 2**40], b""), "sizes are from 0"),
        (raw("FP32", [2**14, 2**15], b""), "more than 268435456 elements"),
        (raw("FP32", [1] * 100, b"1234"), "100 axes; at most 16"),
        (raw("FP8", [1], b"1"), "unknown datatype 'FP8'"),
        (raw("BYTES", [1], b"\x05\0\0\0abc"), "end within element 0"),
        (raw("BYTES", [1], b"\x05\0"), "too few for 1 elements"),
        (raw("BYTES", [2], b"\x01\0\0\0a"), "too few for 2 elements"),
        (one_input("INT8", [1], int_contents=[128]), "INT8 cannot hold"),
        (one_input("UINT16", [1], uint_contents=[65536]), "UINT16 cannot hold"),
        (one_input("INT8", [2], int_contents=[1]), r"1 elements; shape \[2\] has 2"),
        (one_input("FP32", [1], int_contents=[1]), "FP32 is given in fp32_contents, not int_contents"),
        (one_input("FP16", [1], fp32_contents=[1]), "'FP16' has no contents but raw bytes"),
    ],
)
def test_a_tensor_that_contradicts_itself_is_refused(message: theirs.ModelInferRequest, text: str) -> None:
    with pytest.raises(RequestError, match=text) as caught:
        read(message)
    assert caught.value.status == 400


def test_inputs_are_either_all_raw_or_all_typed_and_each_is_given_once() -> None:
    both = raw("UINT8", [1], b"\x07")
    both.inputs[0].contents.uint_contents.append(7)
    with pytest.raises(RequestError, match="contents beside raw_input_contents"):
        read(both)
    missing = raw("UINT8", [1], b"\x07")
    missing.inputs.add(name="y", datatype="UINT8", shape=[1])
    with pytest.raises(RequestError, match="1 entries, for 2 inputs"):
        read(missing)
    twice = raw("UINT8", [1], b"\x07")
    twice.inputs.add(name="x", datatype="UINT8", shape=[1])
    twice.raw_input_contents.append(b"\x08")
    with pytest.raises(RequestError, match="twice"):
        read(twice)


def test_inputs_and_outputs_are_limited_in_number() -> None:
    many = raw("UINT8", [1], b"\x07")
    for name in ("y", "z", "w"):
        many.outputs.add(name=name)
    with pytest.raises(RequestError, match="3 outputs; at most 2"):
        read(many)
    for name in ("y", "z"):
        many.inputs.add(name=name, datatype="UINT8", shape=[1])
    with pytest.raises(RequestError, match="3 inputs; at most 2"):
        read(many)
