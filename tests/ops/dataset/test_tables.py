from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from dagexec import NetDef, OperatorDef, Workspace, op
from dagexec.core.tensor import Tensor
from dagexec.errors import AccessError, DagexecError, OperatorError
from dagexec.ops.families.dataset.shuffling import MinimalStandard
from tests.caffe2_cases import recorded_cases
from tests.caffe2_replay import problem_of
from tests.ops.running import run_operator

FIELDS = ["id", "words:lengths", "words:values:letters:lengths", "words:values:letters:values"]
COLUMNS = [
    np.array([7, 3, 5, 4], np.int64),
    np.array([2, 0, 1, 3], np.int32),
    np.array([1, 2, 0, 1, 1, 1], np.int32),
    np.arange(12, dtype=np.float32).reshape(6, 2),
]
ROWS = [[[0], [1, 2]], [], [[]], [[3], [4], [5]]]
"""Of each row its words, and of each word the rows of the last column."""


def fed(**blobs: npt.NDArray[Any]) -> Workspace:
    workspace = Workspace()
    for name, array in {**{f"f{i}": column for i, column in enumerate(COLUMNS)}, **blobs}.items():
        workspace.feed_blob(name, array)
    return workspace


def run(workspace: Workspace, *operators: OperatorDef, kind: str = "dag") -> list[npt.NDArray[Any]]:
    """Run them as a net; the tensors that the last one gives."""
    workspace.run_net_once(NetDef(name="net", type=kind, num_workers=2, op=operators))
    tensors = [name for name in operators[-1].output if isinstance(workspace.get_blob(name).value, Tensor)]
    return [workspace.fetch_blob(name) for name in tensors]


def rows_of(columns: list[npt.NDArray[Any]], first: int = 0) -> list[Any]:
    """Rows as in ROWS, with the rows of the last column numbered by their values."""
    _, words, letters, values = columns
    assert [column.dtype for column in columns] == [column.dtype for column in COLUMNS]
    letters_of = np.split(values[:, 0].astype(int) // 2, np.cumsum(letters)[:-1]) if len(letters) else []
    ends = np.cumsum(words)
    return [[part.tolist() for part in letters_of[end - count : end]] for end, count in zip(ends, words, strict=True)]


INPUTS = [f"f{index}" for index in range(len(FIELDS))]
CURSOR = op("CreateTreeCursor", [], ["cursor"], fields=FIELDS)
OFFSETS = op("ComputeOffset", ["cursor", *INPUTS], ["offsets"])
OUTPUTS = [f"y{index}" for index in range(len(FIELDS))]


def test_batches_follow_one_another_with_their_lists() -> None:
    for size, whole, expected in ((1, 0, 4), (3, 0, 2), (3, 1, 1), (9, 0, 1)):
        workspace = fed()
        run(workspace, CURSOR)
        found: list[Any] = []
        next_batch = op("ReadNextBatch", ["cursor", *INPUTS], OUTPUTS, batch_size=size, enforce_batch_size=whole)
        for _ in range(expected):
            columns = run(workspace, next_batch)
            found += rows_of(columns)
        assert found == ROWS[: len(found)]
        assert len(found) == (3 if whole else 4)
        assert not any(len(column) for column in run(workspace, next_batch)), "it ends"
        assert rows_of(run(workspace, op("ResetCursor", ["cursor"], []), next_batch)) == ROWS[:size]


def test_rows_in_any_order() -> None:
    workspace = fed(order=np.array([3, 0, 2], np.int64))
    (offsets,) = run(workspace, CURSOR, OFFSETS)
    assert offsets.tolist() == [[0, 0, 0], [1, 2, 3], [2, 2, 3], [3, 3, 3], [4, 6, 6]]
    read = op("ReadRandomBatch", ["cursor", "order", "offsets", *INPUTS], OUTPUTS, batch_size=2, loop_over=1)
    chosen = [ROWS[index] for index in (3, 0, 2)]
    for expected in (chosen[:2], chosen[2:], chosen[:2]):
        assert rows_of(run(workspace, read)) == expected
    run(workspace, op("ResetCursor", ["cursor"], []))
    read = op("ReadRandomBatch", ["cursor", "order", "offsets", *INPUTS], OUTPUTS, batch_size=2, enforce_batch_size=1)
    assert [len(run(workspace, read)[0]) for _ in range(3)] == [2, 0, 0]


@pytest.mark.parametrize("number", [39, 41])
def test_caffe2_read_the_same_with_a_cursor(number: int) -> None:
    case = recorded_cases()[number]
    with_fields = recorded_cases()[40].net.op[0]
    workspace = Workspace()
    for name, array in case.inputs.items():
        workspace.feed_blob(name, array)
    workspace.run_net_once(NetDef(name="net", op=[with_fields, *case.net.op]))
    for name, array in case.outputs.items():
        assert not problem_of(workspace.fetch_blob(name), array), name


def test_a_shuffled_order_is_sorted_within_its_reach_and_the_same_each_time() -> None:
    generator = MinimalStandard()
    for _ in range(10000):
        generator.below(2**31 - 3)
    assert generator._state == 1043618065, "the C++ standard says so of the 10000th number"
    keys = np.random.default_rng(3).permutation(50).astype(np.int32)
    orders = []
    for _ in range(2):
        workspace = fed(keys=keys)
        order = op("SortAndShuffle", ["cursor", "keys"], ["order"], sort_by_field_idx=0, batch_size=4, shuffle_size=3)
        orders += run(workspace, op("CreateTreeCursor", [], ["cursor"], fields=["keys"]), order)
    assert orders[0].dtype == np.int64
    assert orders[0].tolist() == orders[1].tolist()
    assert sorted(orders[0].tolist()) == list(range(50))
    assert sorted(keys[orders[0][-2:]]) == [48, 49], "what fills no batch comes last"
    batches = keys[orders[0][:48]].reshape(12, 4)
    assert (np.ptp(batches // 12, axis=1) == 0).all(), "rows are mixed with those of three batches"
    assert (np.diff(batches[:, 0]) < 0).any()
    assert (np.diff(batches, axis=1) < 0).any()


def test_rows_are_appended_trimmed_packed_and_unpacked() -> None:
    for kind in ("simple", "dag"):
        workspace = fed(**{f"a{i}": column[:0] for i, column in enumerate(COLUMNS)})
        added = [f"a{index}" for index in range(4)]
        run(workspace, op("CreateMutex", [], ["mutex"]))
        for _ in range(2):
            run(workspace, op("AtomicAppend", ["mutex", *added, *INPUTS], added), kind=kind)
        twice = run(
            workspace,
            op("CheckDatasetConsistency", added, [], fields=FIELDS),
            op("TrimDataset", added, added, fields=FIELDS, multiple_of=5),
            kind=kind,
        )
        assert rows_of(twice) == [*ROWS, ROWS[0]]
        assert run(workspace, op("Append", ["f0", "a0"], ["f0"]))[0].tolist() == [7, 3, 5, 4, 7, 3, 5, 4, 7]
        (packed,) = run(workspace, op("PackRecords", added, ["packed"], fields=FIELDS), kind=kind)
        assert packed.shape == (5,)
        workspace.feed_blob("chosen", packed[[3, 0]])
        unpack = op("UnPackRecords", ["chosen"], OUTPUTS, fields=FIELDS)
        assert rows_of(run(workspace, unpack)) == [ROWS[3], ROWS[0]]
        workspace.feed_blob("chosen", packed[:0])
        nothing = run(workspace, op("UnPackRecords", ["chosen", *added], OUTPUTS, fields=FIELDS))
        assert [(a.shape, a.dtype) for a in nothing] == [((0, *c.shape[1:]), c.dtype) for c in COLUMNS]
        all_in_one = op("PackRecords", added, ["packed"], fields=FIELDS, pack_to_single_shared_ptr=1)
        run(workspace, all_in_one)
        assert rows_of(run(workspace, op("UnPackRecords", ["packed"], OUTPUTS, fields=FIELDS))) == [*ROWS, ROWS[0]]


def test_a_table_grows_by_many_appends() -> None:
    for rows in (np.arange(6, dtype=np.float32).reshape(3, 2), np.array([b"a", b"bc"], object)):
        workspace = fed(table=rows[:0], added=rows)
        net = workspace.create_net(NetDef(name="grow", op=[op("Append", ["table", "added"], ["table"])]), "dag")
        for turn in range(40):
            net.run()
            workspace.feed_blob("added", rows[turn % 2 :])
        expected = np.concatenate([rows, *(rows[turn % 2 :] for turn in range(39))])
        assert workspace.fetch_blob("table").tolist() == expected.tolist()


READ = op("ReadNextBatch", ["cursor", *INPUTS], OUTPUTS, batch_size=4)


@pytest.mark.parametrize(
    ("operator", "blobs", "said"),
    [
        (READ, {"f1": np.array([9, 9, 9, 9], np.int32)}, "'words:lengths' do not add up to the 6 elements"),
        (READ, {"f1": np.array([1, 1, 1, -1], np.int32)}, "do not add up"),
        (READ, {"f1": np.array([1, 1, 1, 1], np.int64)}, "must be a vector of int32"),
        (READ, {"f3": np.float32(1)}, "'words:values:letters:values' is a scalar"),
        (op("ReadNextBatch", ["cursor", "f0"], ["y"]), {}, "expected 4 fields"),
        (op("ReadNextBatch", ["cursor", *INPUTS], ["y"]), {}, "expected 4 outputs"),
        (op("ReadNextBatch", ["f0", *INPUTS], OUTPUTS), {}, "'f0' holds"),
        (op("CheckDatasetConsistency", INPUTS, [], fields=FIELDS), {"f0": np.zeros(3, np.int64)}, "has 4 elements"),
        (op("CheckDatasetConsistency", INPUTS, [], fields=FIELDS), {"f3": np.zeros((8, 2), np.float32)}, "add up"),
        (
            op("CreateTreeCursor", [], ["c"], fields=["a:values", "a:lengths"]),
            {},
            "'a:values' comes before its lengths",
        ),
        (
            op("ReadRandomBatch", ["cursor", "order", "offsets", *INPUTS], OUTPUTS),
            {"order": np.array([4], np.int64)},
            "an index is not one of 4 rows",
        ),
        (
            op("SortAndShuffle", ["cursor", *INPUTS], ["order"], sort_by_field_idx=2),
            {},
            "a field with an element a row",
        ),
        (op("Append", ["f3", "f0"], ["f3"]), {}, "cannot append int64"),
        (op("UnPackRecords", ["text"], ["y"], fields=["a"]), {"text": np.array([b"\xff"], object)}, "no packed record"),
        (op("UnPackRecords", ["text"], ["y"], fields=["a"]), {"text": np.array([], object)}, "no prototypes"),
        (op("CollectTensor", ["v", "f0"], ["v"], num_to_collect=0), {}, "must be 1 or more"),
        (op("ConcatTensorVector", ["v"], ["y"]), {}, "no tensors"),
        (op("KeyValueToMap", ["f0", "f1"], ["m"]), {"f1": np.zeros(3, np.int32)}, "as many keys as values"),
        (op("IndexGet", ["index", "f0"], ["y"]), {"f0": np.arange(5)}, "the index is full"),
        (op("IndexLoad", ["index", "f0"], ["index"]), {"f0": np.array([1, 1])}, "different keys"),
        (op("IndexGet", ["index", "f1"], ["y"]), {}, "the keys of the index are int64; found int32"),
        (op("ByteWeightDequant", ["f0"], ["y"], shape=[4]), {"f0": np.zeros(3, np.uint8)}, "expected 4 bytes"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_does_not_fit_is_refused(operator: OperatorDef, blobs: dict[str, npt.NDArray[Any]], said: str) -> None:
    workspace = fed(order=np.zeros(1, np.int64))
    makers = [op("CreateTensorVector", [], ["v"]), op("LongIndexCreate", [], ["index"], max_elements=4)]
    run(workspace, CURSOR, OFFSETS, *makers)
    for name, array in blobs.items():
        workspace.feed_blob(name, array)
    with pytest.raises(DagexecError, match=re.escape(said)):
        run(workspace, operator)


def test_a_sample_of_tensors_is_collected() -> None:
    workspace = fed(x=np.zeros((2, 3), np.float32), y=np.zeros((1,), np.int64))
    run(workspace, op("CreateTensorVector", [], ["v"]), op("CreateTensorVector", [], ["w"]))
    collect = op("CollectTensor", ["v", "w", "x", "y"], ["v", "w"], num_to_collect=4)
    collect.device_option.random_seed = 5
    net = workspace.create_net(NetDef(name="collect", op=[collect]), "dag")
    for turn in range(40):
        workspace.feed_blob("x", np.full((1 + turn % 2, 3), turn, np.float32))
        workspace.feed_blob("y", np.array([turn]))
        net.run()
    sizes = run(workspace, op("TensorVectorSize", ["v"], ["size"]))
    assert sizes[0].dtype == np.int32
    assert sizes[0] == 4
    (x,) = run(workspace, op("ConcatTensorVector", ["v"], ["all"]))
    (y,) = run(workspace, op("ConcatTensorVector", ["w"], ["all"]))
    assert len(set(y)) == 4
    assert max(y) > 3, "later ones take the places of the first"
    assert x[:, 0].tolist() == [turn for turn in y for _ in range(1 + turn % 2)]


def test_an_index_numbers_keys_from_1() -> None:
    for maker, keys in (
        ("IntIndexCreate", np.arange(10, 18, dtype=np.int32)),
        ("LongIndexCreate", np.arange(10, 18) << 40),
        ("StringIndexCreate", np.array([b"entry%d" % index for index in range(8)], object)),
    ):
        workspace = Workspace()
        for name, array in {"keys": keys[:5], "some": keys[[0, 3, 0, 4, 5]].reshape(5, 1), "others": keys[4:]}.items():
            workspace.feed_blob(name, array)
        load, get = op("IndexLoad", ["index", "keys"], ["index"]), op("IndexGet", ["index", "some"], ["numbers"])
        (numbers,) = run(workspace, op(maker, [], ["index"], max_elements=10), load, get)
        assert numbers.dtype == np.int64
        assert numbers.tolist() == [[1], [4], [1], [5], [6]]
        (numbers,) = run(
            workspace, op("IndexFreeze", ["index"], ["index"]), op("IndexGet", ["index", "others"], ["numbers"])
        )
        assert numbers.tolist() == [5, 6, 0, 0]
        assert run(workspace, op("IndexSize", ["index"], ["size"]))[0] == 7
        (stored,) = run(workspace, op("IndexStore", ["index"], ["stored"]))
        assert stored.dtype == keys.dtype
        assert stored.tolist() == keys[:6].tolist()
        skipping = op("IndexLoad", ["index", "keys"], ["index"], skip_first_entry=1)
        assert run(workspace, skipping, op("IndexStore", ["index"], ["s"]))[0].tolist() == keys[1:5].tolist()


def test_maps_and_small_ones() -> None:
    workspace = fed(keys=np.array([5, 3, 5], np.int64), values=np.array([1, 2, 4], np.int32))
    both = run(
        workspace,
        op("KeyValueToMap", ["keys", "values"], ["map"]),
        op("MapToKeyValue", ["map"], ["k", "v"]),
    )
    assert [(a.dtype, a.tolist()) for a in both] == [(np.int64, [5, 3]), (np.int32, [4, 2])]
    made = op("CreateMap", [], ["map"], key_dtype=10)
    both = run(workspace, made, op("MapToKeyValue", ["map"], ["k", "v"]))
    assert [(a.dtype, a.shape) for a in both] == [(np.int64, (0,)), (np.int32, (0,))]
    x = np.array([[0, 1], [2, 3]], np.int32)
    assert run_operator("IsMemberOf", [x], value=[1, 2])[0].tolist() == [[False, True], [True, False]]
    strings = np.array([b"a", b"b"], object)
    assert run_operator("IsMemberOf", [strings], value=["b"])[0].tolist() == [False, True]
    weights = np.array([0, 51, 255], np.uint8)
    for given in (weights, np.array([weights.tobytes()], object)):
        (floats,) = run_operator("ByteWeightDequant", [given], shape=[3, 1], min=-1.0, max=4.0)
        np.testing.assert_allclose(floats, [[-1], [0], [4]], atol=1e-6)
    pieces = run_operator("UnsafeCoalesce", [np.ones((2, 1), np.float32), np.zeros(3, np.float32)], outputs=3)
    assert [piece.tolist() for piece in pieces] == [[[1], [1]], [0, 0, 0], [1, 1, 0, 0, 0]]


def test_rows_of_a_text_file(tmp_path: Path) -> None:
    (tmp_path / "rows.txt").write_bytes(b"a\tx\t0.5\nb\t\t-3\nc\tz\t1e2")
    workspace = Workspace(root_folder=tmp_path, allow_io=True)
    create = op("CreateTextFileReader", [], ["r"], filename="rows.txt", num_passes=2, field_types=[4, 4, 1])
    run(workspace, create)
    read = op("TextFileReaderRead", ["r"], ["a", "b", "c"], batch_size=4)
    batches = [run(workspace, read) for _ in range(3)]
    assert [batch[0].tolist() for batch in batches] == [[b"a", b"b", b"c", b"a"], [b"b", b"c"], []]
    assert batches[0][1].tolist() == [b"x", b"", b"z", b"x"]
    assert batches[0][2].tolist() == [0.5, -3, 100, 0.5]
    assert batches[2][2].dtype == np.float32
    (tmp_path / "rows.txt").write_bytes(b"a\tb\tc\n")
    with pytest.raises(OperatorError, match="row 1: not a number: b'c'"):
        run(workspace, create, read)
    with pytest.raises(DagexecError, match="the rows have 3 fields, not 1"):
        run(workspace, create, op("TextFileReaderRead", ["r"], ["a"]))
    with pytest.raises(AccessError, match="reads files"):
        run(Workspace(), create)
