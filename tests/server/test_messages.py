"""Bodies of requests and responses: what a tensor is in them, and everything that can be wrong."""

from __future__ import annotations

import json
import struct
from contextlib import suppress
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagexec.server.inference import InferenceResponse, RequestError
from dagexec.server.limits import Limits
from dagexec.server.messages import ParsedRequest, parse_request, write_response
from dagexec.server.tensors import ProtocolError

LIMITS = Limits(tensors=3, axes=4, elements=1000)


def parsed(message: Any, binary: bytes = b"", header_length: int | None = -1) -> ParsedRequest:
    text = message if isinstance(message, bytes) else json.dumps(message).encode()
    length = len(text) if header_length == -1 else header_length
    return parse_request("m", None, memoryview(text + binary), length, LIMITS)


def tensor(datatype: str, shape: list[int], **rest: Any) -> dict[str, Any]:
    return {"name": "x", "datatype": datatype, "shape": shape, **rest}


def one_input(datatype: str, shape: list[int], binary: bytes = b"", **rest: Any) -> np.ndarray:
    if "data" not in rest:
        rest["parameters"] = {"binary_data_size": len(binary)}
    return parsed({"inputs": [tensor(datatype, shape, **rest)]}, binary).request.inputs["x"]


NUMBERS = {
    "UINT8": np.uint8, "UINT16": np.uint16, "UINT32": np.uint32, "UINT64": np.uint64,
    "INT8": np.int8, "INT16": np.int16, "INT32": np.int32, "INT64": np.int64,
    "FP16": np.float16, "FP32": np.float32, "FP64": np.float64,
}  # fmt: skip


@pytest.mark.parametrize("datatype", NUMBERS)
def test_numbers_are_the_same_as_json_and_as_bytes(datatype: str) -> None:
    dtype = np.dtype(NUMBERS[datatype])
    extremes = np.iinfo(dtype) if dtype.kind in "iu" else np.finfo(dtype)
    values = np.array([[extremes.min, 0, 1], [2, 3, extremes.max]], dtype)
    for found in (
        one_input(datatype, [2, 3], values.tobytes()),
        one_input(datatype, [2, 3], data=values.tolist()),
        one_input(datatype, [2, 3], data=values.reshape(-1).tolist()),
    ):
        assert found.dtype == dtype
        np.testing.assert_array_equal(found, values)


def test_bytes_of_numbers_stay_where_they_came() -> None:
    text = json.dumps({"inputs": [tensor("FP32", [4], parameters={"binary_data_size": 16})]}).encode()
    body = np.frombuffer(text + bytes(16), np.uint8).copy()
    found = parse_request("m", None, memoryview(body), len(text), LIMITS).request.inputs["x"]
    assert np.shares_memory(found, body)


def test_other_kinds_of_values() -> None:
    truth = one_input("BOOL", [3], b"\x00\x01\x02")
    assert truth.dtype == np.bool_
    assert truth.view(np.uint8).tolist() == [0, 1, 1]
    assert one_input("BOOL", [2], data=[True, False]).tolist() == [True, False]
    half = one_input("BF16", [2], struct.pack("<HH", 0x3F80, 0xC000))
    assert half.dtype == ml_dtypes.bfloat16
    assert half.astype(np.float32).tolist() == [1, -2]
    texts = [b"", "naïve".encode(), b"\xff\x00"]
    binary = b"".join(struct.pack("<I", len(text)) + text for text in texts)
    assert one_input("BYTES", [3, 1], binary).tolist() == [[text] for text in texts]
    assert one_input("BYTES", [1, 2], data=[["a", "naïve"]]).tolist() == [[b"a", "naïve".encode()]]
    assert one_input("FP32", [0, 3], data=[]).shape == (0, 3)
    assert one_input("FP32", [], data=[5]).shape == ()


X4 = bytes(16)
BAD: list[tuple[Any, bytes, str]] = [
    (b"{", b"", "no JSON"),
    (b"[" * 100_000, b"", "no JSON"),
    (b"\xff\xfe", b"", "no JSON"),
    ([], b"", "expected a JSON object"),
    ({}, b"", "inputs must be a list"),
    ({"inputs": {}}, b"", "inputs must be a list"),
    ({"inputs": [3]}, b"", "an input must be a JSON object"),
    ({"inputs": [{}]}, b"", "name must be a text"),
    ({"inputs": [tensor("FP32", [1], data=[1])] * 2}, b"", "is there twice"),
    ({"inputs": [{"name": str(n)} for n in range(4)]}, b"", "4 inputs; at most 3"),
    ({"inputs": [tensor("FP32", [1], data=[1], dat=1)]}, b"", "unknown keys"),
    ({"inputs": [tensor("FP33", [1], data=[1])]}, b"", "unknown datatype 'FP33'"),
    ({"inputs": [{"name": "x", "shape": [1], "data": [1]}]}, b"", "unknown datatype None"),
    ({"inputs": [{"name": "x", "datatype": "FP32", "data": [1]}]}, b"", "shape must be a list"),
    ({"inputs": [tensor("FP32", [-1], data=[1])]}, b"", "sizes are from 0"),
    ({"inputs": [tensor("FP32", [1.0], data=[1])]}, b"", "sizes are from 0"),  # type: ignore[list-item]
    ({"inputs": [tensor("FP32", [True], data=[1])]}, b"", "sizes are from 0"),
    ({"inputs": [tensor("FP32", [1 << 70], data=[1])]}, b"", "sizes are from 0"),
    ({"inputs": [tensor("FP32", [100, 100], data=[1])]}, b"", "more than 1000 elements"),
    ({"inputs": [tensor("FP32", [1] * 5, data=[1])]}, b"", "5 axes; at most 4"),
    ({"inputs": [tensor("FP32", [2], data=[1])]}, b"", "1 values; shape .2. has 2"),
    ({"inputs": [tensor("FP32", [2, 2], data=[[1, 2, 3], [4]])]}, b"", "different lengths"),
    ({"inputs": [tensor("FP32", [2], data=[1, "2"])]}, b"", "takes numbers only"),
    ({"inputs": [tensor("FP32", [1], data=[True])]}, b"", "takes numbers only"),
    ({"inputs": [tensor("FP32", [1], data=[10**400])]}, b"", "too large|no JSON"),
    ({"inputs": [tensor("INT8", [1], data=[1.5])]}, b"", "takes whole numbers only"),
    ({"inputs": [tensor("INT8", [1], data=[128])]}, b"", "out of bounds"),
    ({"inputs": [tensor("UINT64", [1], data=[-1])]}, b"", "out of bounds"),
    ({"inputs": [tensor("BOOL", [1], data=[1])]}, b"", "takes true and false only"),
    ({"inputs": [tensor("BYTES", [1], data=[1])]}, b"", "takes texts only"),
    ({"inputs": [tensor("BYTES", [1], data=["\ud800"])]}, b"", "surrogates"),
    ({"inputs": [tensor("BF16", [1], data=[1])]}, b"", "JSON has no BF16"),
    ({"inputs": [tensor("FP32", [1], data={})]}, b"", "data must be a list"),
    ({"inputs": [tensor("FP32", [1])]}, b"", "data must be a list"),
    ({"inputs": [tensor("FP32", [4], parameters={"binary_data_size": 16})]}, X4[:-1], "16 bytes are announced, 15"),
    ({"inputs": [tensor("FP32", [4], parameters={"binary_data_size": 16})]}, X4 + b"a", "1 bytes behind the last"),
    ({"inputs": [tensor("FP32", [3], parameters={"binary_data_size": 16})]}, X4, "16 bytes; FP32 of shape .3. has 12"),
    ({"inputs": [tensor("FP32", [4], parameters={"binary_data_size": -1})]}, X4, "must be a whole number"),
    ({"inputs": [tensor("FP32", [4], data=[1], parameters={"binary_data_size": 16})]}, X4, "has data and"),
    ({"inputs": [tensor("FP32", [4], parameters=[])]}, b"", "parameters must be a JSON object"),
    ({"inputs": [tensor("BYTES", [2], parameters={"binary_data_size": 4})]}, X4[:4], "too few for 2 elements"),
    (
        {"inputs": [tensor("BYTES", [1], parameters={"binary_data_size": 4})]},
        b"\xff\xff\xff\xff",
        "end within element 0",
    ),
    ({"inputs": [tensor("BYTES", [1], parameters={"binary_data_size": 5})]}, bytes(5), "1 bytes behind its last"),
    ({"inputs": [tensor("FP32", [4], parameters={"shared_memory_region": "r"})]}, b"", "unknown shared memory region"),
    ({"inputs": [], "outputs": [{"name": "y", "parameters": {"shared_memory_region": "r"}}]}, b"", "shared memory"),
    ({"inputs": [], "outputs": [{"name": "y", "parameters": {"classification": 3}}]}, b"", "classification"),
    ({"inputs": [], "outputs": [{"name": "y"}] * 2}, b"", "is there twice"),
    ({"inputs": [], "outputs": "y"}, b"", "outputs must be a list"),
    ({"inputs": [], "parameters": {"binary_data_output": 1}}, b"", "must be true or false"),
    ({"inputs": [], "id": 7}, b"", "id must be a text"),
]


@pytest.mark.parametrize(("message", "binary", "text"), BAD)
def test_what_is_wrong_is_said(message: Any, binary: bytes, text: str) -> None:
    with pytest.raises(ProtocolError, match=text) as caught:
        parsed(message, binary)
    assert caught.value.status == 400
    assert len(str(caught.value)) < 1000


def test_a_header_length_beyond_the_body_is_refused() -> None:
    with pytest.raises(ProtocolError, match="and the body has 14 bytes"):
        parsed({"inputs": []}, header_length=15)


@given(st.binary(max_size=200), st.integers(0, 200))
def test_any_bytes_are_a_request_or_refused(body: bytes, length: int) -> None:
    with suppress(ProtocolError):
        parse_request("m", None, memoryview(body), length, LIMITS)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.sampled_from(["name", "shape", "datatype", "data", "parameters", "binary_data_size"]), inner, max_size=4
    ),
    max_leaves=10,
)  # fmt: skip


@pytest.mark.slow
@given(
    json_values, json_values, st.sampled_from([*NUMBERS, "BYTES", "BOOL", "BF16"]), json_values, st.binary(max_size=9)
)
def test_any_json_is_a_tensor_or_refused(shape: Any, data: Any, datatype: str, parameters: Any, binary: bytes) -> None:
    one = {"name": "x", "shape": shape, "datatype": datatype, "data": data, "parameters": parameters}
    try:
        found = parsed({"inputs": [one]}, binary).request.inputs["x"]
    except ProtocolError:
        return
    assert list(found.shape) == shape


def response(results: dict[str, np.ndarray], **request: Any) -> tuple[dict[str, Any], list[bytes]]:
    answer = InferenceResponse(model="m", version="1", id="i", outputs=results)
    text, binary = write_response(parsed({"inputs": [], **request}), answer)
    return json.loads(text), [bytes(one) for one in binary]


def test_results_are_json_unless_the_client_wants_bytes() -> None:
    y, z = np.float32([[1, 2.5]]), np.array([[b"ab"], [b""]], object)
    message, binary = response({"y": y, "z": z}, outputs=[{"name": "y", "parameters": {"binary_data": True}}])
    assert message == {
        "model_name": "m",
        "model_version": "1",
        "id": "i",
        "outputs": [
            {"name": "y", "datatype": "FP32", "shape": [1, 2], "parameters": {"binary_data_size": 8}},
            {"name": "z", "datatype": "BYTES", "shape": [2, 1], "data": ["ab", ""]},
        ],
    }
    assert binary == [y.tobytes()]
    message, binary = response({"y": y.T, "z": z}, parameters={"binary_data_output": True})
    assert binary == [y.tobytes(), b"\x02\x00\x00\x00ab\x00\x00\x00\x00"]


def test_bfloat16_results_are_bytes_only() -> None:
    y = np.array([1, -2], ml_dtypes.bfloat16)
    _, binary = response({"y": y}, parameters={"binary_data_output": True})
    assert binary == [struct.pack("<HH", 0x3F80, 0xC000)]
    with pytest.raises(ProtocolError, match="BF16"):
        response({"y": y})


def test_results_that_the_protocol_has_no_words_for_are_an_error() -> None:
    for result in (np.complex64([1]), [np.float32([1])]):
        with pytest.raises(RequestError, match="no such tensors") as caught:
            response({"y": result})  # type: ignore[dict-item]
        assert caught.value.status == 500
    with pytest.raises(ProtocolError, match="UTF-8"):
        response({"y": np.array([b"\xff"], object)})
