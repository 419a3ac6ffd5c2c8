from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from dagexec import NetDef, OperatorDef, Workspace
from dagexec.core.device import Device
from dagexec.core.proto import BlobProto, DeviceOption, TensorProto, TensorProtos
from dagexec.core.tensor import Tensor
from dagexec.core.workspace import Net
from dagexec.errors import DagexecError, OperatorError, SchemaError, StorageError
from dagexec.platform.threads import threads
from dagexec.scheduler.exploration import explore_seeds
from dagexec.storage import Mode, open_database
from dagexec.storage.blob_file import INTEGRITY_KEY, read_blob_file
from tests.ops.running import operator_def

Array = npt.NDArray[Any]
NETS = [("simple", None), ("dag", 1), ("dag", 2), ("async_dag", 2)]
TYPES = ["minidb", "lmdb"]
BLOBS: dict[str, Array] = {
    "w": np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4),
    "b": np.arange(3).astype(ml_dtypes.bfloat16),
    "n": np.array([2**40], np.int64),
    "s": np.array([b"x", b""], object),
    "empty": np.zeros((0, 3), np.float16),
}


def here(folder: Path, **blobs: Array) -> Workspace:
    workspace = Workspace(root_folder=folder)
    for name, array in blobs.items():
        workspace.feed_blob(name, array)
    return workspace


def same(one: Array, other: Array) -> bool:
    same_values = one.tolist() == other.tolist() if one.dtype == object else one.tobytes() == other.tobytes()
    return (one.dtype, one.shape) == (other.dtype, other.shape) and same_values


def records(path: Path) -> list[tuple[bytes, bytes]]:
    """The records of a minidb, by Caffe2's description of the format alone."""
    content, found, place = path.read_bytes(), [], 0
    while place < len(content):
        key, value = struct.unpack_from("<ii", content, place)
        place += 8
        found.append((content[place : place + key], content[place + key : place + key + value]))
        place += key + value
    return found


@pytest.mark.parametrize("db_type", TYPES)
def test_saved_blobs_are_loaded_with_type_shape_and_bits(db_type: str, tmp_path: Path) -> None:
    workspace = here(tmp_path, **BLOBS)
    workspace.run_operator_once(operator_def("Save", list(BLOBS), [], db="sub/all", db_type=db_type, chunk_size=5))
    other = here(tmp_path)
    other.run_operator_once(operator_def("Load", [], list(BLOBS), db="sub/all", db_type=db_type))
    for name, array in BLOBS.items():
        assert same(other.fetch_blob(name), array), name


def test_every_record_is_a_blob_that_protobuf_reads_and_the_last_one_a_string(tmp_path: Path) -> None:
    here(tmp_path, w=BLOBS["w"]).run_operator_once(operator_def("Save", ["w"], [], db="w", chunk_size=5))
    found = [(key, BlobProto.FromString(value)) for key, value in records(tmp_path / "w")]
    assert [key for key, _ in found] == [b"w#%0", b"w#%1", b"w#%2", INTEGRITY_KEY.encode()]
    assert found[-1][1].type == "std::string"
    values = [value for _, blob in found[:-1] for value in blob.tensor.float_data]
    assert values == BLOBS["w"].reshape(-1).tolist()


def test_a_file_as_caffe2_writes_it_is_loaded(tmp_path: Path) -> None:
    tensor = TensorProto(dims=[2, 2], data_type=TensorProto.FLOAT, name="w", float_data=[1, 2, 3, 4])
    halves = [TensorProto(dims=[4], data_type=TensorProto.INT64, int64_data=[k, k + 1]) for k in (0, 2)]
    with open_database("minidb", tmp_path / "db", Mode.NEW) as database, database.transaction() as transaction:
        transaction.put(b"w", BlobProto(name="w", type="Tensor", tensor=tensor).SerializeToString())
        for k in (1, 0):
            halves[k].segment.begin, halves[k].segment.end = 2 * k, 2 * k + 2
            blob = BlobProto(name="n", type="Tensor", tensor=halves[k])
            transaction.put(b"n#%%%d" % k, blob.SerializeToString())
        transaction.put(b"t", BlobProto(name="t", type="std::string", content=b"text").SerializeToString())
    workspace = here(tmp_path)
    workspace.run_operator_once(operator_def("Load", [], ["w", "n", "t"], db="db"))
    assert workspace.fetch_blob("w").tolist() == [[1, 2], [3, 4]]
    assert workspace.fetch_blob("n").tolist() == [0, 1, 2, 3]
    assert workspace.get_blob("t").value == b"text"


def test_names_are_changed_by_prefixes_and_overrides(tmp_path: Path) -> None:
    workspace = here(tmp_path, **{"gpu_0/w": BLOBS["w"], "gpu_0/n": BLOBS["n"]})
    both = ["gpu_0/w", "gpu_0/n"]
    workspace.run_operator_once(operator_def("Save", both, [], db="a", strip_prefix="gpu_0/"))
    assert list(read_blob_file("minidb", tmp_path / "a").tensors) == ["w", "n"]
    workspace.run_operator_once(operator_def("Save", both, [], db="b", blob_name_overrides=["x_w", "x_n"]))
    other = here(tmp_path)
    other.run_operator_once(operator_def("Load", [], [], db="b", load_all=1, strip_prefix="x_", add_prefix="cpu/"))
    assert other.blobs() == ["cpu/n", "cpu/w"]
    other.run_operator_once(operator_def("Load", [], ["other"], db="a", source_blob_names=["w"]))
    assert same(other.fetch_blob("other"), BLOBS["w"])
    other.run_operator_once(operator_def("Load", [], ["cpu/w"], dbs=["a"], add_prefix="cpu/"))


def test_several_databases_are_loaded_together_and_a_blob_in_two_is_an_error(tmp_path: Path) -> None:
    workspace = here(tmp_path, **BLOBS)
    workspace.run_operator_once(operator_def("Save", ["w"], [], db="a"))
    workspace.run_operator_once(operator_def("Save", ["n"], [], db="b"))
    other = here(tmp_path)
    other.run_operator_once(operator_def("Load", [], ["w", "n"], dbs=["a", "b"]))
    assert same(other.fetch_blob("n"), BLOBS["n"])
    with pytest.raises(OperatorError, match="blob 'w' occurs twice"):
        other.run_operator_once(operator_def("Load", [], ["w"], dbs=["a", "a"]))


def test_a_missing_blob_is_named_unless_it_may_be_missing(tmp_path: Path) -> None:
    workspace = here(tmp_path, w=BLOBS["w"], v=np.ones(2))
    workspace.run_operator_once(operator_def("Save", ["w"], [], db="a"))
    before = workspace.fetch_blob("w").copy()
    workspace.feed_blob("w", before + 1)
    with pytest.raises(OperatorError, match="not in the database: v; of the requested blobs it has: w"):
        workspace.run_operator_once(operator_def("Load", [], ["w", "v"], db="a"))
    assert same(workspace.fetch_blob("w"), before + 1)  # nothing was changed
    workspace.run_operator_once(operator_def("Load", [], ["w", "v"], db="a", allow_incomplete=1))
    assert same(workspace.fetch_blob("w"), before)
    assert workspace.fetch_blob("v").tolist() == [1, 1]


def test_a_damaged_file_changes_no_blob(tmp_path: Path) -> None:
    workspace = here(tmp_path, **BLOBS)
    workspace.run_operator_once(operator_def("Save", list(BLOBS), [], db="a"))
    content = bytearray((tmp_path / "a").read_bytes())
    content[content.index(BLOBS["w"][2].tobytes())] ^= 1
    (tmp_path / "a").write_bytes(content)
    workspace.feed_blob("w", BLOBS["w"] + 1)
    with pytest.raises(OperatorError, match=f"{tmp_path / 'a'}: damaged: record 'w'"):
        workspace.run_operator_once(operator_def("Load", [], ["w"], db="a"))
    assert same(workspace.fetch_blob("w"), BLOBS["w"] + 1)


def test_loading_into_a_blob_of_the_same_shape_keeps_its_memory(tmp_path: Path) -> None:
    workspace = here(tmp_path, w=BLOBS["w"])
    workspace.run_operator_once(operator_def("Save", ["w"], [], db="a"))
    array = workspace.get_blob("w").tensor().array
    array += 1
    workspace.run_operator_once(operator_def("Load", [], ["w"], db="a"))
    assert workspace.get_blob("w").tensor().array is array
    assert same(array, BLOBS["w"])


def test_absolute_paths_and_the_root_folder_of_a_parent(tmp_path: Path) -> None:
    child = Workspace(parent=here(tmp_path, w=BLOBS["w"]))
    child.run_operator_once(operator_def("Save", ["w"], [], db="a"))
    assert (tmp_path / "a").exists()
    child.run_operator_once(operator_def("Save", ["w"], [], db=str(tmp_path / "b"), absolute_path=1))
    child.run_operator_once(operator_def("DBExists", [], ["e"], db_name="b"))
    assert child.fetch_blob("e").shape == ()
    assert child.fetch_blob("e")
    for name, db_type in (("c", "minidb"), ("b", "lmdb")):
        child.run_operator_once(operator_def("DBExists", [], ["e"], db_name=name, db_type=db_type))
        assert not child.fetch_blob("e")


@pytest.mark.parametrize("kind", NETS)
def test_save_comes_between_the_updates_that_stand_around_it(kind: tuple[str, int | None], tmp_path: Path) -> None:
    """x -> Relu -> x -> Save      x + x -> x, which must wait for Save"""
    workspace = here(tmp_path, x=np.full(20_000, 1, np.float32), y=np.full(20_000, 1, np.float32))
    twice = operator_def("Add", ["x", "y"], ["x"])
    net = NetDef(name="net", op=[twice, operator_def("Save", ["x"], [], db="a"), twice])
    with closing(workspace.create_net(net, *kind)) as made:
        for value in (2, 4, 6):
            made.run()
            assert (read_blob_file("minidb", tmp_path / "a").tensors["x"] == value).all()
            assert (workspace.fetch_blob("x") == value + 1).all()


class closing:  # noqa: N801 - as contextlib has it
    def __init__(self, net: Net) -> None:
        self._net = net

    def __enter__(self) -> Net:
        return self._net

    def __exit__(self, *_exc: object) -> None:
        self._net.close()


def test_no_schedule_saves_a_value_of_another_time(tmp_path: Path) -> None:
    count = iter(range(10**6))

    def scenario() -> None:
        folder = tmp_path / str(next(count))
        workspace = here(folder, x=np.ones(3), y=np.ones(3))
        twice = operator_def("Add", ["x", "y"], ["x"])
        net = NetDef(name="net", op=[twice, operator_def("Save", ["x"], [], db="a"), twice])
        with closing(workspace.create_net(net, "dag", 2)) as made:
            made.run()
        assert read_blob_file("minidb", folder / "a").tensors["x"].tolist() == [2, 2, 2]

    found = explore_seeds(scenario, range(15))
    assert found.failed is None, found.failed
    assert threads().concurrent


@pytest.mark.parametrize("kind", [("simple", None), ("dag", 2), ("async_dag", 2)])
def test_what_a_device_computes_is_saved_on_the_host_and_loaded_to_a_device(
    kind: tuple[str, int | None], tmp_path: Path
) -> None:
    workspace = here(tmp_path, x=np.array([-1, 2], np.float32))
    relu = operator_def("Relu", ["x"], ["y"])
    relu.device_option.CopyFrom(Device("sim", 0).to_option())
    with closing(
        workspace.create_net(NetDef(name="n", op=[relu, operator_def("Save", ["y"], [], db="a")]), *kind)
    ) as net:
        net.run()
    load = operator_def("Load", [], ["z"], db="a", source_blob_names=["y"])
    load.device_option.CopyFrom(Device("sim", 1).to_option())
    with closing(workspace.create_net(NetDef(name="m", op=[load]), *kind)) as net:
        net.run()
        net.run()
    assert list(read_blob_file("minidb", tmp_path / "a").tensors) == ["y"]
    assert workspace.fetch_blob("z").tolist() == [0, 2]
    assert workspace.get_blob("z").get(Tensor).device == Device("sim", 1)
    everything = operator_def("Load", [], [], db="a", load_all=1)
    everything.device_option.CopyFrom(Device("sim", 1).to_option())
    other = here(tmp_path)
    other.run_operator_once(everything)
    assert other.get_blob("y").get(Tensor).device == Device("sim", 1)


def test_the_device_in_the_file_is_kept_when_asked(tmp_path: Path) -> None:
    tensor = TensorProto(dims=[1], float_data=[5], device_detail=Device("sim", 1).to_option())
    with open_database("minidb", tmp_path / "db", Mode.NEW) as database, database.transaction() as transaction:
        transaction.put(b"w", BlobProto(name="w", type="Tensor", tensor=tensor).SerializeToString())
    for keep, device in ((1, Device("sim", 1)), (0, Device())):
        for arguments in ({"load_all": 1}, {}):
            workspace = here(tmp_path)
            outputs = [] if arguments else ["w"]
            workspace.run_operator_once(operator_def("Load", [], outputs, db="db", keep_device=keep, **arguments))
            assert workspace.get_blob("w").get(Tensor).device == device


@pytest.mark.parametrize(
    ("option", "problem"),
    [(DeviceOption(device_type=6), "device type number 6"), (Device("cuda", 99).to_option(), "cuda")],
)
def test_a_device_in_the_file_that_is_not_here_matters_only_when_it_is_to_be_kept(
    option: DeviceOption, problem: str, tmp_path: Path
) -> None:
    tensors = {
        "first": TensorProto(dims=[1], float_data=[4], device_detail=Device().to_option()),
        "w": TensorProto(dims=[1], float_data=[5], device_detail=option),
    }
    with open_database("minidb", tmp_path / "db", Mode.NEW) as database, database.transaction() as transaction:
        for name, tensor in tensors.items():
            blob = BlobProto(name=name, type="Tensor", tensor=tensor)
            transaction.put(name.encode(), blob.SerializeToString())
    workspace = here(tmp_path, first=np.zeros(1, np.float32))
    with pytest.raises(OperatorError, match=problem):
        workspace.run_operator_once(operator_def("Load", [], ["first", "w"], db="db", keep_device=1))
    assert workspace.fetch_blob("first").tolist() == [0]
    workspace.run_operator_once(operator_def("Load", [], ["first", "w"], db="db"))
    assert (workspace.fetch_blob("first").tolist(), workspace.fetch_blob("w").tolist()) == ([4], [5])


@pytest.mark.parametrize("op_type", ["Checkpoint", "Snapshot"])
def test_checkpoint_writes_every_so_many_iterations_to_its_own_file(op_type: str, tmp_path: Path) -> None:
    workspace = here(tmp_path, iteration=np.zeros(1, np.int64), w=BLOBS["w"])
    net = workspace.create_net(
        NetDef(name="n", op=[operator_def(op_type, ["iteration", "w"], [], db="at_%04d.minidb", every=3)]), "dag", 2
    )
    for iteration in range(8):
        workspace.feed_blob("iteration", np.array([iteration]))
        net.run()
    net.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["at_0000.minidb", "at_0003.minidb", "at_0006.minidb"]
    other = here(tmp_path)
    other.run_operator_once(operator_def("Load", [], ["iteration", "w"], db="at_0006.minidb"))
    assert other.fetch_blob("iteration").tolist() == [6]


@pytest.mark.parametrize(
    ("definition", "problem"),
    [
        (operator_def("Save", ["w"], [], db="a", db_type="leveldb"), "one of .*minidb.*found 'leveldb'"),
        (operator_def("Save", ["w"], [], db=""), "'db' must be a path"),
        (operator_def("Save", ["w"], []), "'db' is required"),
        (operator_def("Save", ["w", "w"], [], db="a"), "two blobs would be named 'w'"),
        (operator_def("Save", ["w"], [], db="a", blob_name_overrides=["a", "b"]), "expected 1"),
        (operator_def("Save", ["w"], [], db="a", blob_name_overrides=["a#%0"]), "cannot be named 'a#%0'"),
        (operator_def("Save", ["w"], [], db="a", blob_name_overrides=["a"], strip_prefix="b"), "cannot be combined"),
        (operator_def("Save", ["w"], [], db="a", chunk_size=-5), "chunk_size"),
        (operator_def("Checkpoint", ["n", "w"], [], db="a%s"), "no other conversion"),
        (operator_def("Checkpoint", ["n", "w"], [], db="%d%d"), "at most one %d"),
        (operator_def("Checkpoint", ["n", "w"], [], db="a", every=0), "1 or more, found 0"),
        (operator_def("Checkpoint", ["w"], [], db="a"), "one integer, found float32"),
        (operator_def("Load", [], ["x"]), "expected 'db', 'dbs' or readers"),
        (operator_def("Load", [], [], db="a"), "nothing would be loaded"),
        (operator_def("Load", [], ["x"], db="none"), "none"),
        (operator_def("Load", [], ["x"], db="a", source_blob_names=["a", "b"]), "expected 1 different"),
        (operator_def("Load", [], ["x"], db="a", load_all=1, source_blob_names=["a"]), "cannot be combined"),
        (operator_def("CreateDB", [], ["r"], db="a", shard_id=1), "0 <= shard_id"),
        (operator_def("DBExists", [], ["e"], db_name="a", db_type="x"), "found 'x'"),
    ],
)
def test_what_does_not_fit_is_refused_and_writes_nothing(definition: OperatorDef, problem: str, tmp_path: Path) -> None:
    workspace = here(tmp_path, w=BLOBS["w"], n=BLOBS["n"])
    with pytest.raises(DagexecError, match=problem) as caught:
        workspace.run_operator_once(definition)
    assert isinstance(caught.value, OperatorError | SchemaError | StorageError | DagexecError)
    assert list(tmp_path.iterdir()) == []


def dataset(path: Path, count: int = 7, db_type: str = "minidb") -> None:
    with open_database(db_type, path, Mode.NEW) as database, database.transaction() as transaction:
        for k in range(count):
            image = TensorProto(dims=[2, 2], data_type=TensorProto.FLOAT, float_data=[k, k + 0.5, -k, 0])
            label = TensorProto(data_type=TensorProto.INT32, int32_data=[k])
            transaction.put(b"%03d" % k, TensorProtos(protos=[image, label]).SerializeToString())


@pytest.mark.parametrize("db_type", TYPES)
@pytest.mark.parametrize("kind", NETS)
def test_batches_come_in_the_order_of_the_database_and_go_round(
    db_type: str, kind: tuple[str, int | None], tmp_path: Path
) -> None:
    dataset(tmp_path / "db", db_type=db_type)
    workspace = here(tmp_path)
    workspace.run_operator_once(operator_def("CreateDB", [], ["r"], db="db", db_type=db_type))
    take = operator_def("TensorProtosDBInput", ["r"], ["x", "label"], batch_size=3)
    with closing(
        workspace.create_net(NetDef(name="n", op=[take, operator_def("Negative", ["x"], ["y"])]), *kind)
    ) as net:
        for labels in ([0, 1, 2], [3, 4, 5], [6, 0, 1]):
            net.run()
            assert workspace.fetch_blob("label").tolist() == labels
            assert workspace.fetch_blob("y")[:, 0, 0].tolist() == [-k for k in labels]
            assert workspace.fetch_blob("x").shape == (3, 2, 2)


def test_a_record_alone_has_no_batch_axis_and_shards_take_turns(tmp_path: Path) -> None:
    dataset(tmp_path / "db")
    workspace = here(tmp_path)
    workspace.run_operator_once(operator_def("CreateDB", [], ["r"], db="db", num_shards=3, shard_id=1))
    take = operator_def("TensorProtosDBInput", ["r"], ["x", "label"], shapes=["2,2", ""], dtypes=["float32", "int32"])
    net = workspace.create_net(NetDef(name="n", op=[take]), "simple")
    for label in (1, 4, 1):
        net.run()
        assert workspace.fetch_blob("label").shape == ()
        assert workspace.fetch_blob("label") == label


def test_operators_that_share_a_reader_read_nothing_ahead_and_keep_their_order(tmp_path: Path) -> None:
    dataset(tmp_path / "db")
    workspace = here(tmp_path)
    workspace.run_operator_once(operator_def("CreateDB", [], ["r"], db="db"))
    ops = [operator_def("TensorProtosDBInput", ["r"], [f"x{k}", f"l{k}"], batch_size=2) for k in range(2)]
    with closing(workspace.create_net(NetDef(name="n", op=ops), "dag", 2)) as net:
        for first, second in (([0, 1], [2, 3]), ([4, 5], [6, 0])):
            net.run()
            assert workspace.fetch_blob("l0").tolist() == first
            assert workspace.fetch_blob("l1").tolist() == second


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (b"\xff\xff", "record b'zzz'"),
        (
            TensorProtos(protos=[TensorProto(dims=[2], float_data=[1, 2])]).SerializeToString(),
            "has 1 tensors; expected 2",
        ),
        (
            TensorProtos(protos=[TensorProto(dims=[3], float_data=[1, 2, 3])] * 2).SerializeToString(),
            r"record 1 of the batch is float32\[3\]; expected float32\[2, 2\]",
        ),
    ],
)
def test_a_damaged_record_read_ahead_reaches_the_run_that_would_use_it(
    value: bytes, problem: str, tmp_path: Path
) -> None:
    dataset(tmp_path / "db", 3)
    with open_database("minidb", tmp_path / "db", Mode.WRITE) as database, database.transaction() as transaction:
        transaction.put(b"zzz", value)
    workspace = here(tmp_path)
    workspace.run_operator_once(operator_def("CreateDB", [], ["r"], db="db"))
    take = operator_def("TensorProtosDBInput", ["r"], ["x", "label"], batch_size=2)
    net = workspace.create_net(NetDef(name="n", op=[take]), "simple")
    net.run()
    assert workspace.fetch_blob("label").tolist() == [0, 1]
    with pytest.raises(OperatorError, match=problem):
        net.run()


def test_load_takes_blobs_from_readers(tmp_path: Path) -> None:
    workspace = here(tmp_path, **BLOBS)
    workspace.run_operator_once(operator_def("Save", ["w"], [], db="a"))
    workspace.run_operator_once(operator_def("Save", ["n"], [], db="b", db_type="lmdb"))
    workspace.run_operator_once(operator_def("CreateDB", [], ["ra"], db="a"))
    workspace.run_operator_once(operator_def("CreateDB", [], ["rb"], db="b", db_type="lmdb"))
    workspace.run_operator_once(operator_def("Load", ["ra", "rb"], ["p", "q"], source_blob_names=["w", "n"]))
    assert same(workspace.fetch_blob("p"), BLOBS["w"])
    assert same(workspace.fetch_blob("q"), BLOBS["n"])
