"""padded-rows: operators that compute rows apart, of which only a run decides how many there are, become one operator.

Each of them would be prepared anew for each number of rows: behind `NonZero`, the experts of a mixture with a router.
Together they are the body of a `PaddedRows`, which is prepared for few numbers. That rows are apart is proved
(`dagexec.core.row_axes`), for the sizes of the first and the last probe of what is known of types.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from dagexec.compiler.passes.draft import Draft
from dagexec.compiler.passes.post_operations import Types
from dagexec.compiler.passes.rewriting import Pass
from dagexec.core.node import Node, new_node
from dagexec.core.program import Program
from dagexec.core.proto import NetDef
from dagexec.core.purity import is_pure
from dagexec.core.registry import schema_of
from dagexec.core.row_axes import RowFollower
from dagexec.core.schema import OpSchema, TensorType
from dagexec.core.shape_values import asked_operators
from dagexec.core.traits import Rows
from dagexec.errors import RowsError
from dagexec.platform.records import dataclass

_FEWEST = 3
"""Operators: what fewer save is less than the copies of rows take."""


@dataclass(frozen=True)
class _Region:
    """Operators behind one that counts.

    Attributes:
        members: their numbers, in list order.
        moved: those of operators between them that read what they write, and go behind them.
        rows: where each blob that they write has its rows, if it does.
    """

    members: Sequence[int]
    moved: Sequence[int]
    rows: dict[str, Rows | None]


def edit(draft: Draft) -> None:
    """Look behind each operator whose outputs are as large as values say."""
    for number in draft.having(_is_counted):
        node, types = draft[number], draft.types()
        if draft.is_free(number) and len(node.output) == 1 and node.output[0] in types:
            axis = _open_axis(node.output[0], types)
            region = None if axis is None else _region_behind(draft, node.output[0], axis, types)
            if region is not None and axis is not None:
                _rewrite(draft, node.output[0], axis, region)


def _is_counted(schema: OpSchema) -> bool:
    return schema.counted is not None


def _open_axis(name: str, types: Types) -> int | None:
    """The one axis whose size is not known."""
    axes = [axis for axis, size in enumerate(types[name].shape) if size is None]
    return axes[0] if len(axes) == 1 else None


def _region_behind(draft: Draft, source: str, axis: int, types: Types) -> _Region | None:
    """As many operators as can be; None where these are few.

    What somebody outside reads must have rows: what does not is outside, too.
    """
    outside: set[int] = set()
    while True:
        region = _grown(draft, source, axis, types, outside)
        if len(region.members) < _FEWEST:
            return None
        refused = [
            number
            for number in region.members
            if any(region.rows.get(name) != _plain(region, name) for name in _results(draft, region.members, [number]))
        ]
        if not refused:
            return region if all(map(draft.is_free, region.moved)) else None
        outside.add(refused[-1])


def _plain(region: _Region, name: str) -> Rows | None:
    """The rows of a blob as a result may have them: a slice for each, one after another."""
    rows = region.rows.get(name)
    return Rows(-2) if rows is None else Rows(rows.axis)


def _results(draft: Draft, members: Collection[int], of: Sequence[int]) -> list[str]:
    """What some members write and others than members read."""
    inside = set(members)
    return [
        name
        for number in of
        for name in draft[number].output
        if name in draft.outputs or not inside.issuperset(draft.readers(name))
    ]


def _grown(draft: Draft, source: str, axis: int, types: Types, outside: Collection[int]) -> _Region:
    listed = list(draft.operators())
    asked = asked_operators([node for _, node in listed], [schema_of(node.type) for _, node in listed])
    followers = [_Probe(draft, types, probe) for probe in (0, -1)]
    for follower in followers:
        follower.take(source, axis)
    members, between = list[int](), list[int]()
    inside, behind = {source}, set[str]()
    for index, (number, node) in enumerate(listed):
        if behind.isdisjoint(node.input) and inside.isdisjoint(node.input):
            continue
        is_member = (
            behind.isdisjoint(node.input)
            and number not in outside
            and _may_join(draft, number, node, inside, types)
            and _are_apart(followers, node, is_asked=index in asked)
        )
        if is_member:
            members.append(number)
            inside.update(node.output)
        else:
            between.append(number)
            behind.update(node.output)
    rows = {name: followers[0].agreed(name, followers[1]) for number in members for name in draft[number].output}
    last = members[-1] if members else -1
    return _Region(members, [one for one in between if members and draft.is_listed_before(one, last)], rows)


def _are_apart(followers: Sequence[_Probe], node: Node, *, is_asked: bool) -> bool:
    """True where an operator keeps rows apart for all sizes that are followed."""
    kept = [follower.follows(node, is_asked=is_asked) for follower in followers]
    return all(kept)


def _may_join(draft: Draft, number: int, node: Node, inside: Collection[str], types: Types) -> bool:
    """True for what only computes, from what is inside and from other blobs of known types."""
    schema = schema_of(node.type)
    known = all(name in inside or name in types for name in node.input) and all(name in types for name in node.output)
    return known and draft.is_free(number) and is_pure(node) and not schema.sub_nets and not schema.handles


class _Probe:
    """Rows followed for the sizes of one probe."""

    def __init__(self, draft: Draft, types: Types, probe: int) -> None:
        self._draft, self._types, self._probe = draft, types, probe
        self._follower = RowFollower(draft.model.name)
        self._taken: set[str] = set()

    def take(self, name: str, axis: int | None) -> None:
        """Begin with a blob."""
        self._taken.add(name)
        constant = self._draft.constant(name)
        if constant is not None:
            self._follower.take_constant(name, constant)
            return
        kind = self._types[name]
        self._follower.take_type(name, TensorType(kind.shapes[self._probe], kind.meta), axis)

    def follows(self, node: Node, *, is_asked: bool) -> bool:
        """Go on with an operator; False where its rows are not apart."""
        for name in node.input:
            if name not in self._taken:
                self.take(name, None)
        try:
            self._follower.follow(0, node, is_asked=is_asked)
        except RowsError:
            return False
        self._taken.update(node.output)
        return True

    def agreed(self, name: str, other: _Probe) -> Rows | None:
        """Where a blob has its rows, if that is the same for another probe."""
        rows = self._follower.rows_of(name)
        return rows if rows == other._follower.rows_of(name) else None


def _rewrite(draft: Draft, source: str, axis: int, region: _Region) -> None:
    nodes = [draft[number] for number in region.members]
    written = {name for node in nodes for name in node.output}
    results = _results(draft, region.members, region.members)
    captured = list(dict.fromkeys(name for node in nodes for name in node.input if name not in written | {source}))
    header = NetDef(name=f"rows of {source}", external_input=[source, *captured], external_output=results)
    axes = [rows.axis for name in results if (rows := region.rows[name]) is not None]
    body = Program(tuple(nodes), header).message()
    made = new_node(
        "PaddedRows", [source, *captured], results, name=nodes[-1].name, rows_net=body, axes=[axis], result_axes=axes,
        captured=captured,
    )  # fmt: skip
    draft.changed(f"{len(nodes)} operators on as many rows as {source!r} says become PaddedRows")
    moved = [draft[number] for number in region.moved]
    *others, last = region.members
    for number in (*others, *region.moved):
        draft.remove(number)
    draft.replace(last, made, *moved)


PASS = Pass(
    "padded-rows",
    "Operators that compute rows apart, of which a run decides how many there are, become one operator.",
    edit,
    needs=(_is_counted,),
)
