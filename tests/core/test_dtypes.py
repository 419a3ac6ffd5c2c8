"""Element types: names, numbers and NumPy dtypes lead to one TypeMeta."""

import pickle

import ml_dtypes
import numpy as np
import onnx
import pytest

from dagexec.core import dtypes
from dagexec.core.dtypes import ALL_TYPES, BFLOAT16, FLOAT32, HELD_TYPES, NARROW_TYPES, STRING, TypeMeta
from dagexec.errors import ArgumentError, ShapeError

NUMBERS = {
    "float32": 1, "int32": 2, "string": 4, "bool": 5, "uint8": 6, "int8": 7, "uint16": 8, "int16": 9, "int64": 10,
    "float16": 12, "float64": 13,
}  # fmt: skip


@pytest.mark.parametrize("meta", HELD_TYPES, ids=str)
def test_every_type_is_found_by_name_number_and_numpy_dtype(meta: TypeMeta) -> None:
    assert dtypes.from_name(meta.name.upper()) is meta
    assert dtypes.from_number(meta.number) is meta
    assert dtypes.from_numpy(meta.numpy) is meta
    assert meta.itemsize == meta.numpy.itemsize
    assert pickle.loads(pickle.dumps(meta)) is meta


def test_numbers_are_those_of_caffe2_and_bfloat16_is_above_them() -> None:
    assert {meta.name: meta.number for meta in ALL_TYPES if meta is not BFLOAT16} == NUMBERS
    assert BFLOAT16.number > max(NUMBERS.values())


def test_numbers_in_onnx_are_those_of_its_message() -> None:
    theirs = {name.lower(): number for name, number in onnx.TensorProto.DataType.items()}
    names = {"float32": "float", "float64": "double"}
    assert {meta.onnx for meta in HELD_TYPES} == {theirs[names.get(meta.name, meta.name)] for meta in HELD_TYPES}
    assert all(meta.onnx == theirs[names.get(meta.name, meta.name)] for meta in HELD_TYPES)
    assert {meta.name: meta.bits for meta in NARROW_TYPES if meta.bits < 8} == {
        "float4e2m1": 4, "uint4": 4, "int4": 4, "uint2": 2, "int2": 2,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("alias", "name"), [("float", "float32"), ("Double", "float64"), ("BYTE", "uint8"), ("half", "float16")]
)
def test_caffe2_names_are_aliases(alias: str, name: str) -> None:
    assert dtypes.from_name(alias).name == name


def test_byte_is_read_as_uint8() -> None:
    assert dtypes.from_number(3).name == "uint8"


@pytest.mark.parametrize("dtype", ["S4", "U2", object])
def test_text_dtypes_are_strings(dtype: str) -> None:
    assert dtypes.from_numpy(dtype) is STRING


def test_kinds_of_type() -> None:
    assert {meta.name for meta in ALL_TYPES if meta.is_float} == {"float16", "bfloat16", "float32", "float64"}
    assert {meta.name for meta in ALL_TYPES if meta.is_integer} == {
        "int8", "uint8", "int16", "uint16", "int32", "int64",
    }  # fmt: skip
    assert BFLOAT16.numpy == np.dtype(ml_dtypes.bfloat16)
    assert str(FLOAT32) == "float32"


def test_unknown_types_are_refused_with_the_known_ones() -> None:
    with pytest.raises(ShapeError, match="dtype timedelta64 is not one a tensor can hold; expected one of float32"):
        dtypes.from_numpy("timedelta64")
    with pytest.raises(ShapeError, match="datetime64"):
        dtypes.from_numpy("datetime64[s]")
    with pytest.raises(ArgumentError, match=r"data type number 11 is unknown; known: \[1, 2, 3"):
        dtypes.from_number(11)
    with pytest.raises(ArgumentError, match="data type 'floaty' is unknown; known: float32"):
        dtypes.from_name("floaty")
