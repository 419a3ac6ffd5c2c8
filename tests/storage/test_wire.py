from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dagexec.core.proto import TensorProto
from dagexec.storage.wire import WireError, decode_varints, encode_varints, fields, length_field, varint

INT64 = st.one_of(st.integers(-(2**63), 2**63 - 1), st.integers(-300, 300))


@settings(max_examples=60)
@given(st.lists(INT64, max_size=40))
def test_packed_varints_are_the_bytes_that_protobuf_writes(values: list[int]) -> None:
    written = TensorProto(int64_data=values).SerializeToString()
    packed = encode_varints(np.array(values, np.int64))
    assert written == (length_field(10, packed) if values else b"")
    assert decode_varints(memoryview(packed)).tolist() == values


@settings(max_examples=60)
@given(st.binary(max_size=60))
def test_bytes_of_any_kind_are_read_as_protobuf_reads_them_or_refused(content: bytes) -> None:
    try:
        found = list(fields(memoryview(content)))
    except WireError:
        return
    assert b"".join(bytes(whole) for _, _, _, whole in found) == content
    try:
        decode_varints(memoryview(content))
    except WireError:
        assert content
        assert content[-1] >= 0x80 or any(
            all(byte >= 0x80 for byte in content[i : i + 10]) for i in range(len(content))
        )


def test_a_field_that_ends_after_the_message_is_refused() -> None:
    with pytest.raises(WireError, match="ends 3 bytes after the message"):
        list(fields(memoryview(varint(3 << 3 | 2) + varint(5) + b"ab")))


def test_a_number_without_an_end_and_a_group_are_refused() -> None:
    with pytest.raises(WireError, match="unterminated"):
        list(fields(memoryview(b"\xff" * 12)))
    with pytest.raises(WireError, match="wire type 3"):
        list(fields(memoryview(varint(1 << 3 | 3))))
    with pytest.raises(WireError, match="number of 11 bytes"):
        decode_varints(memoryview(b"\xff" * 10 + b"\x01"))
