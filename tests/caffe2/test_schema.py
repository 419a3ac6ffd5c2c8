"""Schemas and records of dagexec.caffe2: columns and their names, and what nets and workspaces make of them."""

from __future__ import annotations

import numpy as np
import pytest

from dagexec.caffe2 import core, schema, workspace

USERS = schema.Struct(
    ("id", schema.Scalar(np.int64)),
    ("words", schema.List(schema.Scalar(np.int32))),
    ("scores", schema.Map(schema.Scalar(np.int32), schema.List(schema.Scalar((np.float32, 2))))),
    ("place:city", schema.Scalar(str)),
    ("place:point", schema.Tuple(schema.Scalar(float), schema.Scalar(float))),
)
NAMES = [
    "id", "words:lengths", "words:values", "scores:lengths", "scores:values:keys", "scores:values:values:lengths",
    "scores:values:values:values", "place:city", "place:point:field_0", "place:point:field_1",
]  # fmt: skip


def test_columns_have_the_names_of_the_fields_on_the_way() -> None:
    assert USERS.field_names() == NAMES
    types = dict(zip(NAMES, USERS.field_types(), strict=True))
    assert (types["id"], types["words:lengths"], types["scores:values:values:values"]) == (
        np.dtype(np.int64), np.dtype(np.int32), np.dtype((np.float32, 2)),
    )  # fmt: skip
    again = schema.from_column_list(NAMES, USERS.field_types())
    assert again == USERS
    assert isinstance(again.words, schema.List)
    assert not USERS.has_blobs()
    with pytest.raises(ValueError, match="no blob"):
        USERS.field_blobs()


def test_fields_are_read_by_name_and_by_path() -> None:
    assert USERS.place.city is USERS["place:city"]
    assert USERS["scores:values:keys"] is USERS.scores.keys
    assert USERS.words.lengths is USERS["words:lengths"]
    assert USERS["words:items"] is USERS.words.items
    assert (len(USERS), "place:city" in USERS, "place:street" in USERS, "words:lengths" in USERS) == (
        4,
        True,
        False,
        True,
    )
    assert USERS[["id", "words"]].field_names() == NAMES[:3]
    assert USERS.get("street", 7) == 7
    with pytest.raises(KeyError, match="street"):
        USERS["street"]
    with pytest.raises(AttributeError):
        _ = USERS.street
    with pytest.raises(ValueError, match="'a'"):
        schema.Struct(("a", schema.Scalar()), ("a", schema.Scalar()))


def test_structs_are_added_and_taken_apart() -> None:
    one = schema.Struct(("a", schema.Scalar(np.int32)), ("b:c", schema.Scalar()))
    two = schema.Struct(("b:d", schema.Scalar()), ("e", schema.Scalar()))
    assert (one + two).field_names() == ["a", "b:c", "b:d", "e"]
    assert (one + two - one).field_names() == ["b:d", "e"]
    assert schema.is_schema_subset(one, one + two)
    assert not schema.is_schema_subset(one + two, one)
    with pytest.raises(ValueError, match="'a'"):
        _ = one + schema.Struct(("a", schema.Scalar(np.int32)))
    assert one != schema.Struct(("a", schema.Scalar(np.int64)), ("b:c", schema.Scalar()))
    assert schema.equal_schemas(one, schema.RawTuple(2), check_field_names=False, check_field_types=False)


def test_metadata_goes_with_copies() -> None:
    one = USERS.clone()
    schema.attach_metadata_to_scalars(one, schema.Metadata(categorical_limit=5))
    copy = one.clone_schema()
    assert {metadata.categorical_limit for metadata in copy.field_metadata()} == {5}
    assert set(USERS.field_metadata()) == {None}


def test_schemas_of_numpy_types_and_python_values() -> None:
    kind = np.dtype([("a", np.int32), ("b", [("c", np.float32, 3)])])
    made = schema.from_dtype(kind)
    assert (made.field_names(), made.b.c.dtype) == (["a", "b:c"], np.dtype((np.float32, 3)))
    record = schema.as_record({"x": np.array([1, 2]), "y": [np.array([0.5]), np.array([1.5])]})
    assert record.field_names() == ["x", "y:field_0", "y:field_1"]
    assert schema.data_type_for_dtype(np.float32) == core.DataType.FLOAT


def test_records_are_made_fed_and_fetched() -> None:
    net = core.Net("records")
    with core.NameScope("scope"):
        record = schema.NewRecord(net, USERS[["id", "words"]])
    assert [str(blob) for blob in record.field_blobs()] == ["scope/id", "scope/words:lengths", "scope/words:values"]
    arrays = [np.array([7, 8]), np.array([2, 1], np.int32), np.array([1, 2, 3], np.int32)]
    schema.FeedRecord(record, arrays)
    fetched = schema.FetchRecord(record)
    assert isinstance(fetched, schema.Struct)
    assert [array.tolist() for array in fetched.field_blobs()] == [[7, 8], [2, 1], [1, 2, 3]]
    with pytest.raises(ValueError, match="int64"):
        schema.FeedRecord(record, [np.array([0.5]), *arrays[1:]])
    with pytest.raises(ValueError, match="expected 3 values"):
        schema.FeedRecord(record, arrays[:2])
    with pytest.raises(ValueError, match="rows of shape"):
        schema.Scalar((np.float32, 2), np.zeros((4, 3), np.float32))


def test_nets_fill_records_with_nothing_and_with_constants() -> None:
    net = core.Net("filling")
    empty = schema.InitEmptyRecord(net, USERS[["words", "scores"]], enforce_types=True)
    values = schema.Struct(
        ("a", np.array([[1.5, 2]], np.float32)), ("b", np.array([3, 4])), ("c", np.array(["x", "yz"]))
    )  # fmt: skip
    constant = schema.ConstRecord(net, values)
    workspace.RunNetOnce(net)
    shapes = [array.shape for array in schema.FetchRecord(empty).field_blobs()]
    assert shapes == [(0,)] * 5 + [(0, 2)]
    found = schema.FetchRecord(constant)
    assert (found.a().tolist(), found.b().tolist(), found.c().tolist()) == ([[1.5, 2]], [3, 4], [b"x", b"yz"])
    with pytest.raises(RuntimeError, match="complex"):
        schema.ConstRecord(net, schema.Scalar(blob=np.zeros(1, complex)))
