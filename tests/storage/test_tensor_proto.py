from __future__ import annotations

import struct
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dagexec.core.dtypes import ALL_TYPES, BFLOAT16, FLOAT16, STRING, TypeMeta, from_numpy
from dagexec.core.proto import BlobProto, TensorProto
from dagexec.errors import StorageError
from dagexec.storage.blob_proto import Assembly, decode_blob, encode_blob
from dagexec.storage.tensor_proto import Segment, decode_tensor, encode_tensor

PLENTY = 1 << 40


def an_array(meta: TypeMeta, shape: tuple[int, ...] = (2, 3)) -> npt.NDArray[Any]:
    count = int(np.prod(shape))
    if meta is STRING:
        flat = np.array([b"", b"a", b"\0\xff", b"long" * 50, b"x", b"y"], np.object_)[:count]
        return flat.reshape(shape)
    if meta.name == "bool":
        return (np.arange(count) % 2 == 1).reshape(shape)
    if meta.is_float:
        values = np.array([0.0, -1.5, np.inf, np.nan, 1e-3, 300.0])[:count]
        return values.astype(meta.numpy).reshape(shape)
    info = np.iinfo(meta.numpy)
    return np.array([info.min, info.max, 0, 1, 100, 7], meta.numpy)[:count].reshape(shape)


def same(one: npt.NDArray[Any], other: npt.NDArray[Any]) -> bool:
    if one.dtype == object:
        return one.shape == other.shape and one.tolist() == other.tolist()
    return (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())


def decode(message: bytes, most_bytes: int = PLENTY) -> Segment:
    return decode_tensor(memoryview(message), most_bytes)


@pytest.mark.parametrize("meta", ALL_TYPES, ids=str)
@pytest.mark.parametrize("shape", [(2, 3), (), (0, 4)], ids=str)
def test_a_tensor_of_any_type_comes_back_bit_by_bit(meta: TypeMeta, shape: tuple[int, ...]) -> None:
    array = an_array(meta, shape)
    found = decode(encode_tensor("t", array))
    assert (found.name, found.shape, found.meta) == ("t", shape, meta)
    assert same(found.values.reshape(shape), array)


@pytest.mark.parametrize(
    ("name", "field"),
    [("float32", "float_data"), ("float64", "double_data"), ("int64", "int64_data"), ("string", "string_data")]
    + [(name, "int32_data") for name in ("int32", "bool", "uint8", "int8", "uint16", "int16")],
)
def test_protobuf_finds_the_values_in_the_field_that_caffe2_reads(name: str, field: str) -> None:
    meta = next(kind for kind in ALL_TYPES if kind.name == name)
    array = an_array(meta)
    message = TensorProto.FromString(encode_tensor("t", array))
    assert list(message.dims) == [2, 3]
    assert message.data_type == meta.number
    found = np.array(list(getattr(message, field)), array.dtype)
    assert same(found.reshape(2, 3), array)
    assert [descriptor.name for descriptor, _ in message.ListFields()] == sorted(
        ["dims", "data_type", field, "name"], key=lambda known: TensorProto.DESCRIPTOR.fields_by_name[known].number
    )


@pytest.mark.parametrize("meta", [FLOAT16, BFLOAT16], ids=str)
def test_sixteen_bit_floats_are_their_bits_in_int32_data(meta: TypeMeta) -> None:
    array = an_array(meta)
    message = TensorProto.FromString(encode_tensor("t", array))
    assert list(message.int32_data) == array.reshape(-1).view(np.uint16).tolist()
    assert message.data_type == (TensorProto.FLOAT16 if meta is FLOAT16 else TensorProto.UINT16)
    message.ClearField("device_detail")
    assert decode(message.SerializeToString()).meta == (meta if meta is FLOAT16 else from_numpy(np.uint16))


def test_float16_in_bytes_and_raw_data_are_read() -> None:
    array = an_array(FLOAT16)
    as_bytes = TensorProto(dims=[2, 3], data_type=TensorProto.FLOAT16, byte_data=array.tobytes())
    assert same(decode(as_bytes.SerializeToString()).values.reshape(2, 3), array)
    doubles = np.array([1.5, -2])
    raw = TensorProto(dims=[2], data_type=TensorProto.DOUBLE, storage_type=TensorProto.RAW, raw_data=doubles.tobytes())
    assert same(decode(raw.SerializeToString()).values, doubles)
    plain = TensorProto(dims=[3], data_type=TensorProto.BYTE, byte_data=b"\0\x80\xff")
    assert decode(plain.SerializeToString()).values.tolist() == [0, 128, 255]


def test_numbers_that_are_not_packed_are_read() -> None:
    head = TensorProto(dims=[2], data_type=TensorProto.FLOAT).SerializeToString()
    message = head + b"".join(bytes([3 << 3 | 5]) + struct.pack("<f", value) for value in (1.5, -2))
    assert list(TensorProto.FromString(message).float_data) == [1.5, -2]
    assert decode(message).values.tolist() == [1.5, -2]


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        (TensorProto(dims=[3], float_data=[1, 2]), r"expected 3 values float32 \(shape \(3,\)\), found 2"),
        (TensorProto(dims=[-1]), "negative size"),
        (TensorProto(dims=[1 << 62, 1 << 62]), "do not fit in"),
        (TensorProto(dims=[1 << 40], data_type=TensorProto.BOOL), "do not fit in"),
        (TensorProto(dims=[1], data_type=TensorProto.INT8, int32_data=[200]), "the value 200 is not a valid int8"),
        (TensorProto(dims=[1], data_type=TensorProto.ZERO_COLLISION_HASH), "data type number 14 is unknown"),
        (TensorProto(dims=[1], storage_type=TensorProto.EXTERNAL), "not in the message"),
        (TensorProto(dims=[1], segment=TensorProto.Segment(begin=0, end=2), float_data=[1, 2]), "elements 0 to 2 of 1"),
        (TensorProto(dims=[1], segment=TensorProto.Segment(begin=-1, end=0), float_data=[1]), "elements -1 to 0"),
        (TensorProto(dims=[1], data_type=TensorProto.FLOAT16, byte_data=b"abc"), "not a multiple"),
    ],
)
def test_a_message_that_does_not_hold_its_tensor_is_refused(message: TensorProto, problem: str) -> None:
    with pytest.raises(StorageError, match=problem):
        decode(message.SerializeToString(), 1 << 30)


def test_chunks_are_records_with_segments_that_come_in_any_order() -> None:
    array = np.arange(10, dtype=np.float32).reshape(2, 5)
    records = list(encode_blob("w", array, chunk_size=4))
    assert [key for key, _ in records] == ["w#%0", "w#%1", "w#%2"]
    last = BlobProto.FromString(records[2][1])
    assert (last.name, last.type, last.content_num_chunks, last.content_chunk_id) == ("w", "Tensor", 3, 2)
    assert (last.tensor.segment.begin, last.tensor.segment.end) == (8, 10)
    assert list(last.tensor.float_data) == [8, 9]
    assert list(last.tensor.dims) == [2, 5]
    assembly = assembled([value for _, value in reversed(records)])
    assert same(assembly.finish(), array)


def assembled(values: list[bytes]) -> Assembly:
    assembly = None
    for value in values:
        record = decode_blob(value, PLENTY)
        assert isinstance(record.content, Segment)
        assembly = assembly or Assembly.of(record, record.content)
        assembly.add(record.content, record.chunks)
    assert assembly is not None
    return assembly


@pytest.mark.parametrize(("size", "chunk_size", "keys"), [(4, 4, ["w"]), (9, 0, ["w"]), (0, -1, ["w"]), (9, -1, ["w"])])
def test_a_tensor_of_one_chunk_has_the_plain_key(size: int, chunk_size: int, keys: list[str]) -> None:
    assert [key for key, _ in encode_blob("w", np.zeros(size), chunk_size)] == keys


def test_a_million_elements_are_a_chunk_by_default() -> None:
    assert len(list(encode_blob("w", np.zeros(1_000_001, np.bool_)))) == 2


def test_missing_and_repeated_chunks_are_named() -> None:
    values = [value for _, value in encode_blob("w", np.arange(10.0), chunk_size=4)]
    with pytest.raises(StorageError, match="'w': of 3 chunks 2 are there; elements from 4 on of 10 are missing"):
        assembled([values[0], values[2]]).finish()
    with pytest.raises(StorageError, match="'w': elements 0 to 4 occur twice"):
        assembled([*values, values[0]])
    with pytest.raises(StorageError, match=r"occur twice|missing"):
        assembled([values[0], values[0]]).finish()
    other = next(encode_blob("w", np.arange(11.0), chunk_size=4))[1]
    with pytest.raises(StorageError, match=r"are inconsistent: float64\[10\]"):
        assembled([values[0], other])


def test_a_blob_of_another_kind_is_refused() -> None:
    counter = BlobProto(name="c", type="std::unique_ptr<Counter<int64_t>>", content=b"5")
    with pytest.raises(StorageError, match="holds a std::unique_ptr<Counter<int64_t>>"):
        decode_blob(counter.SerializeToString(), PLENTY)
    with pytest.raises(StorageError, match="not a BlobProto"):
        decode_blob(b"\xff\xff", PLENTY)
    with pytest.raises(StorageError, match="complex64 have no place"):
        encode_tensor("t", np.zeros(2, np.complex64))


def test_bfloat16_keeps_its_bits() -> None:
    array = np.arange(1 << 16, dtype=np.uint16).view(ml_dtypes.bfloat16)
    assert same(decode(encode_tensor("t", array)).values, array)


@settings(max_examples=150)
@given(
    meta=st.sampled_from(ALL_TYPES),
    edits=st.lists(st.tuples(st.integers(0, 200), st.integers(0, 255)), min_size=1, max_size=4),
    cut=st.integers(0, 200),
)
def test_a_mangled_record_is_read_or_refused_and_never_allocates_more_than_it_could_hold(
    meta: TypeMeta, edits: list[tuple[int, int]], cut: int
) -> None:
    content = bytearray(next(encode_blob("w", an_array(meta)))[1])
    for place, value in edits:
        content[place % len(content)] = value
    try:
        record = decode_blob(bytes(content[: max(1, len(content) - cut)]), len(content))
    except StorageError:
        return
    if isinstance(record.content, Segment):
        assert record.content.values.nbytes <= 8 * len(content)
        assert Assembly.of(record, record.content).array.nbytes <= 8 * len(content)
