"""Schemas of records: `Struct(("id", Scalar(np.int64)), ("words", List(Scalar(np.int32))))`.

A Scalar is a column of elements of a type. A List is a column of lengths, and values that stand behind each other: as
many as the lengths add up to. A Struct has fields with names. A column's name is those of the fields on the way to it,
with `:` between. A schema whose columns have blobs is a record.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import namedtuple
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from dagexec.caffe2 import workspace
from dagexec.caffe2.creation import given_tensor
from dagexec.caffe2.net import Net
from dagexec.caffe2.references import BlobReference
from dagexec.core.dtypes import from_numpy

__all__ = [
    "FIELD_SEPARATOR", "ConstRecord", "FeedRecord", "FetchRecord", "Field", "InitEmptyRecord", "List", "Map",
    "Metadata", "NamedTuple", "NewRecord", "RawTuple", "Scalar", "Struct", "Tuple", "as_record",
    "attach_metadata_to_scalars", "data_type_for_dtype", "equal_schemas", "from_blob_list", "from_column_list",
    "from_dtype", "is_schema_subset",
]  # fmt: skip

FIELD_SEPARATOR = ":"

Metadata = namedtuple("Metadata", ["categorical_limit", "expected_value", "feature_specs"], defaults=[None, None, None])
"""What is known of a column besides its type."""


class Field(ABC):
    """A schema. It stays as it is, but for the blobs and the metadata of its columns."""

    @abstractmethod
    def columns(self) -> Iterator[tuple[str, Scalar]]:
        """All columns, with their names; that of a Scalar itself is empty."""

    @abstractmethod
    def clone(self, keep_blobs: bool = True) -> Any:
        """A copy, with the blobs or without."""

    def field_names(self) -> list[str]:
        """The names of all columns."""
        return [name for name, _ in self.columns()]

    def all_scalars(self) -> list[Scalar]:
        """All columns."""
        return [column for _, column in self.columns()]

    def field_types(self) -> list[np.dtype[Any] | None]:
        """The types of all columns."""
        return [column.field_type() for column in self.all_scalars()]

    def field_metadata(self) -> list[Any]:
        """The metadata of all columns."""
        return [column.metadata for column in self.all_scalars()]

    def field_blobs(self) -> list[Any]:
        """What all columns hold. Raises ValueError for a column without blob."""
        return [column() for column in self.all_scalars()]

    def has_blobs(self) -> bool:
        """True when all columns have blobs."""
        return all(column.blob is not None for column in self.all_scalars())

    def clone_schema(self) -> Any:
        """A copy without blobs."""
        return self.clone(keep_blobs=False)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Field) and equal_schemas(self, other)

    __hash__ = object.__hash__


class Scalar(Field):
    """A column.

    Attributes:
        dtype: of an element, which may have a shape of its own, as `(np.float32, 3)`; None where it is not known.
        blob: what holds the column, or its values; None in a schema.
        metadata: what else is known of it.
    """

    def __init__(self, dtype: Any = None, blob: Any = None, metadata: Any = None) -> None:
        """An array as `blob` gives the type where `dtype` does not. Raises ValueError for one of another type."""
        self.dtype = None if dtype is None else np.dtype(dtype)
        self.blob: Any = None
        self.metadata = metadata
        if blob is not None:
            self.set(blob)

    def columns(self) -> Iterator[tuple[str, Scalar]]:
        """Itself."""
        yield "", self

    def clone(self, keep_blobs: bool = True) -> Scalar:
        """A copy."""
        return Scalar(self.dtype, self.blob if keep_blobs else None, self.metadata)

    def field_type(self) -> np.dtype[Any] | None:
        """The type of an element."""
        return self.dtype

    def set(self, blob: Any, metadata: Any = None, unsafe: bool = False) -> None:
        """Let a blob, or an array, hold the column. Raises ValueError for an array of another type, unless `unsafe`."""
        if not isinstance(blob, str | BlobReference):
            blob = np.asarray(blob)
            if self.dtype is None:
                self.dtype = blob.dtype
            elif not unsafe:
                blob = _checked(blob, self.dtype)
        self.blob = BlobReference(blob) if isinstance(blob, str) else blob
        if metadata is not None:
            self.metadata = metadata

    def set_value(self, blob: Any, throw_on_type_mismatch: bool = False, unsafe: bool = False) -> None:
        """`set`, under its other name; with `throw_on_type_mismatch` text is refused where a blob is meant."""
        self.set(blob, unsafe=unsafe or not throw_on_type_mismatch)

    def set_metadata(self, metadata: Any) -> None:
        """Note what else is known."""
        self.metadata = metadata

    def set_type(self, dtype: Any) -> None:
        """Let elements be of this type."""
        self.dtype = None if dtype is None else np.dtype(dtype)

    def get(self) -> Any:
        """What holds the column. Raises ValueError where there is no blob."""
        if self.blob is None:
            raise ValueError("the column has no blob: it is of a schema, not of a record")
        return self.blob

    def __call__(self) -> Any:
        return self.get()

    def __repr__(self) -> str:
        return f"Scalar({self.dtype!r}, {self.blob!r})"


class Struct(Field):
    """Fields with names, in order. A name with `:` is that of a field of a Struct inside: `("user:id", Scalar())`."""

    def __init__(self, *fields: tuple[str, Any] | None) -> None:
        """What is no Field becomes one by `as_record`. Raises ValueError for a name given twice."""
        self.fields: dict[str, Field] = {}
        for name, field in (one for one in fields if one is not None):
            first, _, rest = name.partition(FIELD_SEPARATOR)
            made = as_record(field)
            if rest:
                made = Struct((rest, made))
                before = self.fields.get(first)
                if isinstance(before, Struct):
                    made = before + made
                    self.fields.pop(first)
            if first in self.fields:
                raise ValueError(f"a Struct has one field {first!r}, found two")
            self.fields[first] = made

    def columns(self) -> Iterator[tuple[str, Scalar]]:
        """Those of all fields."""
        for name, field in self.fields.items():
            for inner, column in field.columns():
                yield _joined(name, inner), column

    def clone(self, keep_blobs: bool = True) -> Struct:
        """A copy."""
        return Struct(*((name, field.clone(keep_blobs)) for name, field in self.fields.items()))

    def get_children(self) -> list[tuple[str, Field]]:
        """The fields, with their names."""
        return list(self.fields.items())

    def get(self, item: str, default_value: Any) -> Any:
        """The field of a name, or else the default."""
        return self[item] if item in self else default_value  # noqa: SIM401 - "get" is this method

    def __getitem__(self, item: Any) -> Any:
        """A field by name, `a:b` for one inside; a Struct of several for a list or tuple of names."""
        if isinstance(item, list | tuple):
            return Struct(*((name, self[name]) for name in item))
        name, _, rest = item.partition(FIELD_SEPARATOR)
        if name not in self.fields:
            raise KeyError(f"there is no field {name!r}; there are {list(self.fields)}")
        field: Any = self.fields[name]
        return field[rest] if rest else field

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name not in vars(self).get("fields", ()):
            raise AttributeError(name)
        return self.fields[name]

    def __contains__(self, item: str) -> bool:
        name, _, rest = item.partition(FIELD_SEPARATOR)
        field: Any = self.fields.get(name)
        return field is not None and (not rest or (isinstance(field, Struct | List) and rest in field))

    def __len__(self) -> int:
        return len(self.fields)

    def __add__(self, other: Struct) -> Struct:
        """The fields of both; those that both have must be Structs, and are added. Raises ValueError."""
        fields = dict(self.fields)
        for name, field in other.fields.items():
            before = fields.get(name)
            if before is not None and not (isinstance(before, Struct) and isinstance(field, Struct)):
                raise ValueError(f"both have a field {name!r}, which is not a Struct in both")
            fields[name] = before + field if isinstance(before, Struct) and isinstance(field, Struct) else field
        return Struct(*fields.items())

    def __sub__(self, other: Struct) -> Struct:
        """The fields that `other` does not have; of Structs in both, what is left if anything is."""
        left: list[tuple[str, Field]] = []
        for name, field in self.fields.items():
            removed = other.fields.get(name)
            if isinstance(field, Struct) and isinstance(removed, Struct):
                rest = field - removed
                left.extend([(name, rest)] if rest.fields else [])
            elif removed is None:
                left.append((name, field))
        return Struct(*left)

    def __repr__(self) -> str:
        return f"Struct({', '.join(f'{name}={field!r}' for name, field in self.fields.items())})"


class List(Field):
    """Lists, one in each row.

    Attributes:
        lengths: the column of their lengths.
        items: what they have, of all rows one behind the other.
    """

    def __init__(self, values: Any, lengths_blob: Any = None) -> None:
        self.lengths = lengths_blob.clone() if isinstance(lengths_blob, Scalar) else Scalar(np.int32, lengths_blob)
        self.items = as_record(values)

    def columns(self) -> Iterator[tuple[str, Scalar]]:
        """The lengths, then those of the values."""
        yield "lengths", self.lengths
        for name, column in self.items.columns():
            yield _joined("values", name), column

    def clone(self, keep_blobs: bool = True) -> List:
        """A copy."""
        return List(self.items.clone(keep_blobs), self.lengths.clone(keep_blobs))

    def __getitem__(self, item: str) -> Any:
        name, _, rest = item.partition(FIELD_SEPARATOR)
        if name not in ("lengths", "items", "values"):
            raise KeyError(f"a List has lengths, and values; it has no field {name!r}")
        field: Any = self.lengths if name == "lengths" else self.items
        return field[rest] if rest else field

    def __contains__(self, item: str) -> bool:
        name, _, rest = item.partition(FIELD_SEPARATOR)
        if name not in ("lengths", "items", "values"):
            return False
        return not rest or (name != "lengths" and isinstance(self.items, Struct | List) and rest in self.items)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "items" not in vars(self):
            raise AttributeError(name)
        return getattr(self.items, name)

    def __repr__(self) -> str:
        return f"List({self.lengths!r}, {self.items!r})"


def Map(keys: Any, values: Any, lengths_blob: Any = None) -> List:
    """Keys with values, some in each row: a List of a Struct of both."""
    return List(Struct(("keys", keys), ("values", values)), lengths_blob)


def NamedTuple(name_prefix: str, *fields: Any) -> Struct:
    """A Struct of fields `<prefix>_0`, `<prefix>_1`, and so on."""
    return Struct(*((f"{name_prefix}_{index}", field) for index, field in enumerate(fields)))


def Tuple(*fields: Any) -> Struct:
    """A Struct of fields `field_0`, `field_1`, and so on."""
    return NamedTuple("field", *fields)


def RawTuple(num_fields: int, name_prefix: str = "field") -> Struct:
    """A Struct of so many columns, whose types are not known."""
    return NamedTuple(name_prefix, *(Scalar() for _ in range(num_fields)))


def as_record(value: Any) -> Field:
    """A Field as it is; a list or tuple as a Tuple, a dictionary as a Struct, anything else as what a Scalar holds."""
    if isinstance(value, Field):
        return value
    if isinstance(value, list | tuple):
        pairs = all(isinstance(one, tuple) and len(one) == 2 and isinstance(one[0], str) for one in value)
        return Struct(*value) if value and pairs else Tuple(*value)
    if isinstance(value, dict):
        return Struct(*value.items())
    return Scalar(blob=value)


def from_dtype(dtype: Any, _outer_shape: tuple[int, ...] = ()) -> Field:
    """The schema of a NumPy type: a Struct for one with fields."""
    kind = np.dtype(dtype)
    if kind.fields is None:
        return Scalar((kind, _outer_shape) if _outer_shape else kind)
    return Struct(*((name, from_dtype(kind.fields[name][0])) for name in kind.names or ()))


def from_column_list(
    col_names: Sequence[str],
    col_types: Sequence[Any] | None = None,
    col_blobs: Sequence[Any] | None = None,
    col_metadata: Sequence[Any] | None = None,
) -> Field:
    """The schema that has these columns: `["id", "words:lengths", "words:values"]`. Raises ValueError.

    A field that has `lengths`, and `values`, is a List.
    """
    count = len(col_names)
    types, blobs, metadata = (
        [None] * count if given is None else list(given) for given in (col_types, col_blobs, col_metadata)
    )
    if {len(types), len(blobs), len(metadata)} != {count}:
        raise ValueError(f"expected types, blobs and metadata of {count} columns, found other numbers of them")
    columns = [
        (name.split(FIELD_SEPARATOR), Scalar(*rest))
        for name, *rest in zip(col_names, types, blobs, metadata, strict=True)
    ]
    return _assembled(columns)


def _assembled(columns: Sequence[tuple[list[str], Scalar]]) -> Field:
    if len(columns) == 1 and columns[0][0] in ([], [""]):
        return columns[0][1]
    by_name: dict[str, list[tuple[list[str], Scalar]]] = {}
    for (name, *rest), column in columns:
        by_name.setdefault(name, []).append((rest, column))
    fields = {name: _assembled(below) for name, below in by_name.items()}
    if fields.keys() == {"lengths", "values"} and isinstance(fields["lengths"], Scalar):
        return List(fields["values"], fields["lengths"])
    return Struct(*fields.items())


def from_blob_list(schema: Field, values: Sequence[Any], throw_on_type_mismatch: bool = False) -> Any:
    """A record of the schema, whose columns have these blobs or arrays. Raises ValueError for too few or too many."""
    record = schema.clone_schema()
    columns = record.all_scalars()
    if len(values) != len(columns):
        raise ValueError(f"expected {len(columns)} values, for {schema.field_names()}, found {len(values)}")
    for column, value in zip(columns, values, strict=True):
        column.set(value, unsafe=not throw_on_type_mismatch)
    return record


def equal_schemas(
    schema: Field,
    original_schema: Field,
    check_field_names: bool = True,
    check_field_types: bool = True,
    check_field_metas: bool = False,
) -> bool:
    """True when both have columns of the same names, types and, if asked for, metadata."""
    return (
        len(schema.all_scalars()) == len(original_schema.all_scalars())
        and (not check_field_names or schema.field_names() == original_schema.field_names())
        and (not check_field_types or schema.field_types() == original_schema.field_types())
        and (not check_field_metas or schema.field_metadata() == original_schema.field_metadata())
    )


def is_schema_subset(schema: Field, original_schema: Field) -> bool:
    """True when the names of all columns of `schema` are those of columns of `original_schema`."""
    return set(schema.field_names()) <= set(original_schema.field_names())


def attach_metadata_to_scalars(field: Field, metadata: Any) -> None:
    """Give all columns this metadata."""
    for column in field.all_scalars():
        column.set_metadata(metadata)


def data_type_for_dtype(dtype: Any) -> int:
    """The number of an element type in a TensorProto. Raises TypeError for one that Caffe2 does not have."""
    return from_numpy(np.dtype(dtype).base).number


# Records in nets and workspaces


def NewRecord(net: Net, schema: Field) -> Any:
    """A record of the schema, with new blobs of the net, called as the columns in the name scope that is open."""
    blobs = [net.NextScopedBlob(name or "unnamed_scalar") for name in schema.field_names()]
    return from_blob_list(schema, blobs)


def InitEmptyRecord(net: Net, schema_or_record: Field, enforce_types: bool = False) -> Any:
    """A record, new for a schema, which the net fills with nothing; with `enforce_types`, of the columns' types."""
    record = schema_or_record if schema_or_record.has_blobs() else NewRecord(net, schema_or_record)
    for column in record.all_scalars():
        shape, kind = [0], {}
        if column.dtype is not None:
            shape = [0, *column.dtype.shape]
            kind = {"dtype": data_type_for_dtype(column.dtype)} if enforce_types else {}
        net.ConstantFill([], column(), shape=shape, **kind)
    return record


def ConstRecord(net: Net, array_record: Field) -> Any:
    """A new record that the net fills with the arrays of another one. Raises Caffe2Error for odd element types."""
    record = NewRecord(net, array_record)
    for column, array in zip(record.all_scalars(), array_record.field_blobs(), strict=True):
        net.extend_ops([given_tensor(column(), np.asarray(array))])
    return record


def FeedRecord(blob_record: Field, arrays: Any, ws: Any = None) -> None:
    """Feed the blobs of a record: with those of another record, or with arrays, one for each column.

    In the workspace `ws`, by default the current one. Raises ValueError for other numbers or types.
    """
    values = arrays.field_blobs() if isinstance(arrays, Field) else list(arrays)
    feed = workspace.FeedBlob if ws is None else ws.feed_blob
    given = from_blob_list(blob_record, values, throw_on_type_mismatch=True)
    for column, value in zip(blob_record.all_scalars(), given.all_scalars(), strict=True):
        feed(column(), value())


def FetchRecord(blob_record: Field, ws: Any = None, throw_on_type_mismatch: bool = False) -> Any:
    """A record of the arrays that the blobs of a record hold. Raises ValueError for other types, if asked to."""
    fetch = workspace.FetchBlob if ws is None else ws.fetch
    arrays = [fetch(blob) for blob in blob_record.field_blobs()]
    return from_blob_list(blob_record, arrays, throw_on_type_mismatch)


def _checked(array: Any, dtype: np.dtype[Any]) -> Any:
    """The array, whose elements are of the type. Raises ValueError."""
    text = dtype.base.kind in "SUO" and array.dtype.kind in "SUO"
    if not text and array.dtype != dtype.base:
        raise ValueError(f"expected values of type {dtype.base}, found {array.dtype}")
    if dtype.shape and array.shape[1:] != dtype.shape:
        raise ValueError(f"expected rows of shape {dtype.shape}, found {array.shape[1:]}")
    return array


def _joined(name: str, inner: str) -> str:
    return f"{name}{FIELD_SEPARATOR}{inner}" if inner else name
