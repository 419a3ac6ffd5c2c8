"""NetDef files: what is written is read back, what is broken is named, and the bytes are Caffe2's."""

import os
import struct
from pathlib import Path

import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dagexec import NetDef, OperatorDef, load_net, save_net
from dagexec.core.arguments import make_argument
from dagexec.core.proto import TensorProto, dagexec_pb2
from dagexec.errors import ModelFormatError, OutputError
from dagexec.storage import net_file
from dagexec.storage.net_file import load_message, parse_message

FIXTURES = Path(__file__).parents[1] / "fixtures" / "caffe2"


def sample() -> NetDef:
    net = NetDef(name="sample", type="dag", num_workers=4, external_input=["x"], external_output=["y"])
    op = net.op.add(type="Conv", name="c", engine="E", input=["x", "w"], output=["y"], control_input=["z"])
    op.arg.extend([make_argument("kernel", 3), make_argument("scales", [0.5, 2.0]), make_argument("s", "µ")])
    op.device_option.random_seed = 7
    return net


@pytest.mark.parametrize("name", ["net.pb", "net", "net.pbtxt", "net.prototxt", "net.txt"])
def test_a_net_is_read_back_as_it_was_written(tmp_path: Path, name: str) -> None:
    save_net(sample(), tmp_path / name)
    assert load_net(tmp_path / name) == sample()
    text = name.endswith("txt")
    assert (b'name: "sample"' in (tmp_path / name).read_bytes()) == text


names = st.text('a"\\\0\né€\U0001f600', max_size=5)


@pytest.mark.slow
@given(
    st.lists(st.tuples(names, st.lists(names, max_size=3), st.lists(names, max_size=3)), max_size=4),
    st.lists(st.floats(width=32, allow_nan=False), max_size=4),
    st.booleans(),
)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_net_survives_both_forms(
    tmp_path: Path, ops: list[tuple[str, list[str], list[str]]], floats: list[float], text: bool
) -> None:
    net = NetDef(name="n")
    for kind, inputs, outputs in ops:
        net.op.add(type=kind, input=inputs, output=outputs).arg.append(make_argument("a", floats))
    path = tmp_path / ("net.pbtxt" if text else "net.pb")
    save_net(net, path)
    assert load_net(path) == net


def length_delimited(number: int, content: bytes) -> bytes:
    assert len(content) < 128
    return bytes([number << 3 | 2, len(content)]) + content


UNKNOWN = b"\xfa\x7d" + b"\x03abc"  # field 2015, length-delimited: no message here has it


def test_fields_nobody_knows_survive_a_binary_round_trip(tmp_path: Path) -> None:
    op = length_delimited(4, b"Relu") + length_delimited(1, b"x") + length_delimited(2, b"y") + UNKNOWN
    content = length_delimited(1, b"net") + length_delimited(2, op) + UNKNOWN
    (tmp_path / "in.pb").write_bytes(content)
    net = load_net(tmp_path / "in.pb")
    assert (net.name, net.op[0].type) == ("net", "Relu")
    save_net(net, tmp_path / "out.pb")
    written = (tmp_path / "out.pb").read_bytes()
    assert written.count(UNKNOWN) == 2
    assert len(written) == len(content)
    again = load_net(tmp_path / "out.pb")
    assert again.op[0].SerializeToString(deterministic=True).endswith(UNKNOWN)


@pytest.mark.parametrize("fixture", ["lenet", "squeezenet"])
def test_a_file_of_caffe2_is_written_back_byte_for_byte(tmp_path: Path, fixture: str) -> None:
    original = FIXTURES / fixture / "predict_net.pb"
    save_net(load_net(original), tmp_path / "net.pb")
    assert (tmp_path / "net.pb").read_bytes() == original.read_bytes()


def test_a_truncated_file_is_refused_with_its_path(tmp_path: Path) -> None:
    content = sample().SerializeToString()
    path = tmp_path / "cut.pb"
    boundaries = {0, len(length_delimited(1, b"sample"))}
    for length in range(1, len(content)):
        path.write_bytes(content[:length])
        try:
            shorter = load_net(path)
        except ModelFormatError as error:
            assert str(error).startswith(f"{path}: not a NetDef")  # noqa: PT017 - most lengths fail, not all
        else:
            assert shorter.SerializeToString() == content[:length], "a cut inside a field went unnoticed"
            boundaries.add(length)
    assert len(boundaries) < 10


@given(st.binary(min_size=1, max_size=60))
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_random_bytes_are_a_net_or_refused_with_the_path(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "random.pb"
    path.write_bytes(content)
    try:
        net = load_net(path)
    except ModelFormatError as error:
        assert str(path) in str(error)  # noqa: PT017 - some random bytes are a net
    else:
        assert net.op or net.name or net.external_input
        assert str(net)  # every field can be read


@pytest.mark.parametrize(
    "content",
    [
        b"\x00" * 8,
        b"\xff" * 16,
        b"PK\x03\x04 a zip file",
        b"\x0a\x05ab",
        length_delimited(20, b"only unknown fields"),
        length_delimited(1, b"\xff\xfe name"),
        length_delimited(2, length_delimited(4, b"\xff\xfe type")),
        length_delimited(2, length_delimited(1, b"\xc3")),
    ],
)
def test_what_is_no_net_is_refused_with_the_path(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "no_net.pb"
    path.write_bytes(content)
    with pytest.raises(ModelFormatError, match=r"no_net\.pb: not a NetDef"):
        load_net(path)


@pytest.mark.parametrize("content", [b"name: 5", b"nonsense {", b"\xff\xfe", b"op { tipe: 'Relu' }"])
def test_bad_text_is_refused_with_the_path(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "bad.pbtxt"
    path.write_bytes(content)
    with pytest.raises(ModelFormatError, match=r"bad\.pbtxt: not a NetDef"):
        load_net(path)


def test_deep_nesting_is_refused_rather_than_followed() -> None:
    content = b""
    for _ in range(200):  # net in argument in operator in net, 600 messages deep
        op = field(5, field(8, content))
        content = field(2, op)
    with pytest.raises(ModelFormatError, match="deep: not a NetDef"):
        parse_message(content, NetDef, "deep")


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("the_net", "NetDef.name"), ("an_input", "OperatorDef.input"), ("an_argument", "Argument.name"),
        ("inner", "OperatorDef.engine"), ("a_tensor", "TensorProto.name"), ("a_result", "NetDef.external_output"),
    ],
)  # fmt: skip
def test_a_string_that_is_not_text_is_refused_wherever_it_is(text: str, where: str) -> None:
    inner = NetDef(op=[OperatorDef(type="Relu", engine="inner")])
    arguments = [make_argument("an_argument", inner), make_argument("t", TensorProto(name="a_tensor", dims=[300]))]
    operator = OperatorDef(type="While", input=["x", "an_input"], arg=arguments)
    content = NetDef(name="the_net", op=[operator], external_output=["a_result"]).SerializeToString()
    parse_message(content, NetDef, "text")
    with pytest.raises(ModelFormatError, match=rf"{where} is not UTF-8: b'\\xff"):
        parse_message(content.replace(text.encode(), b"\xff" + text.encode()[1:]), NetDef, "bytes")


def field(number: int, content: bytes) -> bytes:
    size, length = b"", len(content)
    while length > 127:
        size += bytes([length & 127 | 128])
        length >>= 7
    return bytes([number << 3 | 2]) + size + bytes([length]) + content


def test_an_unreadable_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelFormatError, match=r"none\.pb: cannot be read: No such file"):
        load_net(tmp_path / "none.pb")
    with pytest.raises(ModelFormatError, match="cannot be read: Is a directory"):
        load_net(tmp_path)


def test_an_empty_file_is_an_empty_net(tmp_path: Path) -> None:
    (tmp_path / "empty.pb").write_bytes(b"")
    assert load_net(tmp_path / "empty.pb") == NetDef()


def test_other_messages_are_read_too(tmp_path: Path) -> None:
    tensor = TensorProto(dims=[2], float_data=[1.0, 2.0])
    net_file.save_message(tensor, tmp_path / "t.pb")
    assert load_message(tmp_path / "t.pb", TensorProto) == tensor


@pytest.mark.parametrize("failing", ["replace", "fsync"])
def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    path = tmp_path / "net.pb"
    save_net(sample(), path)
    before = path.read_bytes()

    def fail(*_args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, failing, fail)
    with pytest.raises(OutputError, match=r"net\.pb: cannot be written: No space left"):
        save_net(NetDef(name="new"), path)
    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["net.pb"]


def test_a_written_file_has_the_rights_of_any_new_file(tmp_path: Path) -> None:
    (tmp_path / "plain").write_bytes(b"")
    save_net(sample(), tmp_path / "net.pb")
    assert (tmp_path / "net.pb").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_writing_into_no_folder_is_refused_with_the_path(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match=r"net\.pb: cannot be written: No such file"):
        save_net(sample(), tmp_path / "missing" / "net.pb")


def test_bytes_encoded_by_hand_are_the_net_they_say() -> None:
    argument = length_delimited(1, b"alpha") + b"\x15" + struct.pack("<f", 0.25)
    integers = length_delimited(1, b"ints") + b"\x30\x01\x30\x02"  # field 6, varints, not packed
    device = b"\x08\x01\x10\x02\x18\x07"
    op = (
        length_delimited(1, b"x")
        + length_delimited(2, b"y")
        + length_delimited(3, b"first")
        + length_delimited(4, b"LeakyRelu")
        + length_delimited(5, argument)
        + length_delimited(5, integers)
        + length_delimited(6, device)
        + length_delimited(7, b"MKL")
        + length_delimited(8, b"c")
    )
    content = (
        length_delimited(1, b"net")
        + field(2, op)
        + length_delimited(3, b"dag")
        + b"\x20\x04"
        + length_delimited(7, b"x")
        + length_delimited(8, b"y")
    )
    expected = NetDef(name="net", type="dag", num_workers=4, external_input=["x"], external_output=["y"])
    definition = OperatorDef(type="LeakyRelu", name="first", engine="MKL")
    definition.input.append("x")
    definition.output.append("y")
    definition.control_input.append("c")
    definition.arg.extend([make_argument("alpha", 0.25), make_argument("ints", [1, 2])])
    definition.device_option.device_type, definition.device_option.device_id = 1, 2
    definition.device_option.random_seed = 7
    expected.op.append(definition)
    assert parse_message(content, NetDef, "by hand") == expected
    assert expected.SerializeToString(deterministic=True) == content


# Message -> "number name type[*|!|p] [=default]" per field, after the descriptors of a Caffe2 build:
# * repeated, p repeated packed, ! required.
WIRE_FORMAT = {
    "TensorShape": "1 dims int64*; 2 data_type DataType =1; 3 unknown_dims int32*; 4 unknown_shape bool =False; "
    "5 name string",
    "TensorShapes": "1 shapes TensorShape*",
    "Argument": "1 name string; 2 f float; 3 i int64; 4 s bytes; 5 floats float*; 6 ints int64*; 7 strings bytes*; "
    "8 n NetDef; 9 nets NetDef*; 10 t TensorProto; 11 tensors TensorProto*; 12 qtensors QTensorProto*",
    "DeviceOption": "1 device_type int32 =0; 2 device_id int32; 3 random_seed uint32; 4 node_name string; "
    "5 numa_node_id int32; 6 extra_info string*",
    "OperatorDef": "1 input string*; 2 output string*; 3 name string; 4 type string; 5 arg Argument*; "
    "6 device_option DeviceOption; 7 engine string; 8 control_input string*; 9 is_gradient_op bool =False; "
    "10 debug_info string; 11 domain string; 12 op_version int64",
    "NetDef": "1 name string; 2 op OperatorDef*; 3 type string; 4 num_workers int32; 5 device_option DeviceOption; "
    "6 arg Argument*; 7 external_input string*; 8 external_output string*; 9 partition_info PartitionInfo*",
    "TensorProto": "1 dims int64*; 2 data_type DataType =1; 3 float_data floatp; 4 int32_data int32p; "
    "5 byte_data bytes; 6 string_data bytes*; 7 name string; 8 device_detail DeviceOption; 9 double_data doublep; "
    "10 int64_data int64p; 11 segment Segment; 12 storage_type StorageType =1; 13 raw_data bytes; "
    "14 external_data ExternalDataProto",
    "TensorProtos": "1 protos TensorProto*",
    "QTensorProto": "1 dims int64*; 2 precision int32!; 3 scale double!; 4 bias double!; 5 is_signed bool!; "
    "6 data int32p; 7 name string; 8 data_type DataType =2; 9 scales double*; 10 biases double*; 11 axis int32; "
    "12 is_multiparam bool =False",
    "BlobProto": "1 name string; 2 type string; 3 tensor TensorProto; 4 content bytes; 5 qtensor QTensorProto; "
    "6 content_num_chunks int32; 7 content_chunk_id int32",
    "DBReaderProto": "1 name string; 2 source string; 3 db_type string; 4 key string",
    "ExecutionStep": "1 name string; 2 substep ExecutionStep*; 3 network string*; 4 num_iter int64; "
    "5 criteria_network string; 6 concurrent_substeps bool; 7 report_net string; 8 report_interval int32; "
    "9 should_stop_blob string; 10 only_once bool; 11 run_every_ms int64; 12 create_workspace bool; "
    "13 num_concurrent_instances int32",
    "PlanDef": "1 name string; 2 network NetDef*; 3 execution_step ExecutionStep*",
    "PartitionInfo": "1 name string!; 2 device_id int32*; 3 extra_info string",
}

DATA_TYPES = (
    "UNDEFINED=0 FLOAT=1 INT32=2 BYTE=3 STRING=4 BOOL=5 UINT8=6 INT8=7 UINT16=8 INT16=9 INT64=10 FLOAT16=12 DOUBLE=13 "
    "ZERO_COLLISION_HASH=14"
)
STORAGE_TYPES = "TYPED=1 RAW=2 EXTERNAL=3 NO_CONTENT=4"
DEVICE_TYPES = (
    "PROTO_CPU=0 PROTO_CUDA=1 PROTO_MKLDNN=2 PROTO_OPENGL=3 PROTO_OPENCL=4 PROTO_IDEEP=5 PROTO_HIP=6 PROTO_FPGA=7 "
    "PROTO_MSNPU=8 PROTO_XLA=9 PROTO_COMPILE_TIME_MAX_DEVICE_TYPES=10 PROTO_ONLY_FOR_TEST=20901"
)

SCALARS = {
    FieldDescriptor.TYPE_INT64: "int64", FieldDescriptor.TYPE_INT32: "int32", FieldDescriptor.TYPE_UINT32: "uint32",
    FieldDescriptor.TYPE_BOOL: "bool", FieldDescriptor.TYPE_STRING: "string", FieldDescriptor.TYPE_BYTES: "bytes",
    FieldDescriptor.TYPE_FLOAT: "float", FieldDescriptor.TYPE_DOUBLE: "double",
}  # fmt: skip


def described(descriptor: FieldDescriptor) -> str:
    kind = SCALARS.get(descriptor.type)
    if kind is None:
        kind = (descriptor.message_type or descriptor.enum_type).name
    if descriptor.is_repeated:
        label = "p" if descriptor.GetOptions().packed else "*"
    else:
        label = "!" if descriptor.is_required else ""
    default = f" ={descriptor.default_value}" if descriptor.has_default_value else ""
    return f"{descriptor.number} {descriptor.name} {kind}{label}{default}"


@pytest.mark.parametrize("message", WIRE_FORMAT)
def test_every_field_has_the_number_type_label_and_default_of_caffe2(message: str) -> None:
    kind: type[Message] = getattr(dagexec_pb2, message)
    fields = sorted(kind.DESCRIPTOR.fields, key=lambda descriptor: descriptor.number)
    assert "; ".join(described(descriptor) for descriptor in fields) == WIRE_FORMAT[message]


def test_every_enum_has_the_numbers_of_caffe2() -> None:
    for enum, expected in (
        (TensorProto.DESCRIPTOR.enum_types_by_name["DataType"], DATA_TYPES),
        (TensorProto.DESCRIPTOR.enum_types_by_name["StorageType"], STORAGE_TYPES),
        (dagexec_pb2.DESCRIPTOR.enum_types_by_name["DeviceTypeProto"], DEVICE_TYPES),
    ):
        assert " ".join(f"{value.name}={value.number}" for value in enum.values) == expected


@pytest.mark.parametrize("name", ["", ".", "/", "file/net.pb", "a\0b.pb", "n" * 300 + ".pb"])
def test_a_place_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(OutputError, match="cannot be written"):
        save_net(sample(), name)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_path_that_is_none_is_a_model_format_error() -> None:
    with pytest.raises(ModelFormatError, match=r"cannot be read: .*null"):
        load_net("a\0b.pb")
