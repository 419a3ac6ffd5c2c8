"""embedding-bags: loops that sum a range of rows in each iteration become one operator.

PyTorch's EmbeddingBag is exported as a Loop. TorchScript's exporter stacks what each iteration results in, and takes
both bounds of iteration i from vectors; the newer exporter inserts results into a sequence, which is concatenated
behind the loop, and has a branch for bags without rows. Both become `EmbeddingBag`, which reads the rows of the table
themselves where the loop sums what was picked before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from dagexec.compiler.passes.draft import Draft
from dagexec.compiler.passes.nested import Scope
from dagexec.compiler.passes.operator_traits import of_type
from dagexec.compiler.passes.post_operations import Types
from dagexec.compiler.passes.rewriting import Pass
from dagexec.core.dtypes import FLOAT32, INT64
from dagexec.core.node import Node, new_node
from dagexec.platform.records import dataclass

_is_loop = of_type("Loop")
_NET = "loop_net"

_Bound = tuple[str, int]
"""A vector of the graph, and the place of iteration 0 in it."""

_Value = tuple[Scope, str]
"""A value in a net, by its name there."""

_Number = Callable[[Scope, str], int | None]
"""How much more than the number of its iteration a value is; None where it is something else."""


@dataclass(frozen=True)
class _Bags:
    """What a loop sums.

    Attributes:
        rows: the blob whose rows, or those that `indices` pick from it, are added.
        start, end: the bounds of each range.
        result: the blob with all sums.
        last: the operator that writes it.
        is_mean: means are taken.
        wraps: negative indices count from the end.
    """

    rows: str
    indices: str | None
    start: _Bound
    end: _Bound
    result: str
    last: int
    is_mean: bool
    wraps: bool = False


def edit(draft: Draft) -> None:
    """Look at each loop."""
    types = draft.types()
    for number in draft.having(_is_loop):
        if number in draft and draft.is_free(number):
            bags = _stacked(draft, number) or _inserted(draft, number)
            if bags is not None:
                bags = _picked_before(draft, bags, types)
                if _fits(draft, number, bags, types):
                    _rewrite(draft, number, bags)


def _rewrite(draft: Draft, number: int, bags: _Bags) -> None:
    label, node = draft.label(number), draft[bags.last]
    made: list[Node] = []
    bounds = []
    for vector, first in (bags.start, bags.end):
        name = vector
        if first:
            name = draft.fresh(f"{vector}/from {first}")
            end = int(np.iinfo(np.int64).max)
            made.append(new_node("Slice", [vector], [name], starts=[first], ends=[end], axes=[0], onnx_style=1))
        bounds.append(name)
    inputs = [bags.rows, *bounds, *([] if bags.indices is None else [bags.indices])]
    reduction = "mean" if bags.is_mean else "sum"
    made.append(
        new_node(
            "EmbeddingBag", inputs, [bags.result], name=node.name, reduction=reduction, wrap_indices=int(bags.wraps)
        )
    )
    draft.changed(f"{label} becomes EmbeddingBag: each iteration has the {reduction} of a range of rows")
    draft.replace(bags.last, *made)
    if bags.last != number:
        draft.remove(number)


def _fits(draft: Draft, number: int, bags: _Bags, types: Types) -> bool:
    """True where the operator takes such tensors, and there is an end for each iteration."""
    vectors = [bags.start[0], bags.end[0], *([] if bags.indices is None else [bags.indices])]
    kinds = [types.get(name) for name in (bags.rows, *vectors)]
    if any(kind is None for kind in kinds):
        return False
    rows, *others = (kind for kind in kinds if kind is not None)
    if rows.meta is not FLOAT32 or rows.rank < 1 or any(one.meta is not INT64 or one.rank != 1 for one in others):
        return False
    return _is_length(draft, _count(draft, number), *bags.end, types)


def _count(draft: Draft, number: int) -> str:
    """The blob that says how many iterations there are; see `_inserted` for loops that compare numbers with it."""
    if draft.arguments(number).bool("trip_count"):
        return draft[number].input[0]
    scope = Scope.of(draft, draft[number])[_NET]
    compared = scope.writer(scope.results[0], "LT")
    assert compared is not None
    return scope.outer(compared[1].input[1]) or ""


def _is_length(draft: Draft, count: str, vector: str, first: int, types: Types) -> bool:
    """True where blob `count` says how many elements a vector has from place `first` on."""
    value, kind = draft.constant(count), types[vector]
    if value is not None:
        return value.size == 1 and all(shape == (int(value.item()) + first,) for shape in kind.shapes)
    measured = _measured(draft, count)
    joined = draft.producer(vector) if first else None
    if joined is None:
        return not first and measured == vector
    names = draft[joined].input if draft[joined].type == "Concat" else ()
    behind = types.get(names[1]) if len(names) == 2 else None
    return behind is not None and names[0] == measured and behind.shape == (first,)


def _measured(draft: Draft, count: str) -> str | None:
    """The vector whose length a blob is."""
    number = draft.producer(count)
    if number is None:
        return None
    node = draft[number]
    if node.type == "Size":
        return node.input[0]
    index = draft.constant(node.input[1]) if node.type == "Gather" else None
    shape = draft.producer(node.input[0])
    if index is None or index.ndim or index or shape is None or draft[shape].type != "Shape":
        return None
    return None if len(draft[shape].values) else draft[shape].input[0]


def _stacked(draft: Draft, number: int) -> _Bags | None:
    """A loop that stacks the sum of a range of rows in each of a number of iterations."""
    node, arguments = draft[number], draft.arguments(number)
    scope = Scope.of(draft, node).get(_NET)
    if scope is None or not arguments.bool("trip_count"):
        return None
    if len(scope.given) != 2 or len(scope.results) != 2 or len(node.output) != 1:
        return None
    given = draft.constant(node.input[1]) if arguments.bool("condition") else np.True_
    if given is None or not given or not _is_true(scope, scope.results[0]):
        return None

    def number_of(at: Scope, name: str) -> int | None:
        return 0 if at.place(name) == (scope, scope.given[0]) else None

    return _summed(scope, scope.results[1], number_of, node.output[0], number, keeps_axis=False)


def _is_true(scope: Scope, name: str) -> bool:
    """True for a condition that is true whenever the iteration began."""
    cast = scope.writer(name, "Cast")
    if cast is not None:
        return _is_true(cast[0], cast[1].input[0])
    value = scope.constant(name)
    return bool(value) if value is not None and value.size == 1 else name == scope.given[1]


def _inserted(draft: Draft, number: int) -> _Bags | None:
    """A loop that appends the sum of a range of rows to a sequence, and counts up to a number."""
    node, arguments = draft[number], draft.arguments(number)
    scope = Scope.of(draft, node).get(_NET)
    if scope is None or arguments.bool("trip_count") or not arguments.bool("condition") or len(scope.given) != 4:
        return None
    if len(scope.results) != 3 or len(node.output) != 2 or draft.is_read(node.output[1]):
        return None
    goes_on, inserted, counted = (
        scope.writer(name, kind) for name, kind in zip(scope.results, ("LT", "SequenceInsert", "Add"), strict=True)
    )
    if goes_on is None or inserted is None or counted is None or len(inserted[1].input) != 2:
        return None
    sequence, place = scope.given[2:]

    def number_of(at: Scope, name: str) -> int | None:
        if at.place(name) == (scope, place):
            return 0
        made = at.writer(name, "Reshape", "Add")
        if made is None:
            return None
        before = number_of(made[0], made[1].input[0])
        if made[1].type == "Reshape" or before is None:
            return before if tuple(made[1].arguments("").ints("shape")) == (-1,) else None
        more = made[0].constant(made[1].input[1])
        return before + int(more.item()) if more is not None and more.size == 1 else None

    last = draft.only_reader(node.output[0])
    is_counted = number_of(scope, scope.results[2]) == 1 and goes_on[1].input[0] == scope.results[2]
    count = scope.outer(goes_on[1].input[1])
    if last is None or not is_counted or count is None or inserted[1].input[0] != sequence:
        return None
    if not _is_concatenation(draft, last) or not _begins(draft, node, count):
        return None
    row = _of_rows(scope, inserted[1].input[1], number_of, count)
    if row is None:
        return None
    value, rows = row
    bags = _summed(*value, number_of, draft[last].output[0], last, keeps_axis=True)
    return bags if bags is None or rows is None or _ends_there(draft, bags.end[0], *rows) else None


def _is_concatenation(draft: Draft, number: int) -> bool:
    arguments = draft.arguments(number)
    is_along_rows = arguments.int("axis", 0) == 0 and not arguments.bool("new_axis")
    return draft[number].type == "ConcatFromSequence" and is_along_rows


def _begins(draft: Draft, node: Node, count: str) -> bool:
    """True where a loop of `_inserted` starts with number 0 and no results, if 0 is less than `count`."""
    condition, sequence, place = node.input[:3]
    empty, first, goes_on = draft.producer(sequence), draft.constant(place), draft.constant(condition)
    if empty is None or draft[empty].type != "SequenceEmpty" or first is None or first.any():
        return False
    if goes_on is not None:
        return bool(goes_on)
    compared = draft.producer(condition)
    if compared is None or draft[compared].type != "LT" or draft[compared].input[1] != count:
        return False
    zero = draft.constant(draft[compared].input[0])
    return zero is not None and zero.size == 1 and not zero.any()


def _of_rows(scope: Scope, name: str, number_of: _Number, count: str) -> tuple[_Value, _Value | None] | None:
    """The sum or mean of a range, of which a branch gives zeros where the range is empty.

    Means of the last range are sums divided by the rows from its start on: the second value says then how many rows
    there are, which has to be where that range ends.
    """
    branch = scope.writer(name, "If")
    if branch is None:
        return (scope, name), None
    around, node = branch
    empty, other = _branches(around, node)
    zeros, compared = empty.constant(empty.results[0]), around.writer(node.input[0], "EQ")
    if zeros is None or zeros.any() or compared is None:
        return None
    rows = None
    last = other.writer(other.results[0], "If")
    if last is not None:
        quotient, other = _branches(*last)
        rows = _rows_of_last(quotient, other)
        if rows is None or not _is_of_last(*last, number_of, count):
            return None
    value = other, other.results[0]
    part = _part(*value)
    if part is None:
        return None
    bounds = [part[0].place(one) for one in part[1].input[1:3]]
    return (value, rows) if [compared[0].place(one) for one in compared[1].input] == bounds else None


def _branches(scope: Scope, node: Node) -> tuple[Scope, Scope]:
    nets = Scope.of(scope.draft, node, scope)
    return nets["then_net"], nets["else_net"]


def _part(scope: Scope, name: str) -> tuple[Scope, Node] | None:
    """The range whose sum or mean a value is."""
    reduced = scope.writer(name, "ReduceSum", "ReduceMean")
    return None if reduced is None else reduced[0].writer(reduced[1].input[0], "Slice")


def _is_of_last(scope: Scope, node: Node, number_of: _Number, count: str) -> bool:
    """True where a branch is for iteration `count` - 1."""
    compared = scope.writer(node.input[0], "EQ")
    if compared is None or number_of(compared[0], compared[1].input[0]) != 0:
        return False
    at, name = compared[0], compared[1].input[1]
    last, number = at.constant(name), scope.draft.constant(count)
    if last is not None and number is not None:
        return int(last.item()) == int(number.item()) - 1
    less = at.writer(name, "Sub")
    one = None if less is None else less[0].constant(less[1].input[1])
    return less is not None and less[0].outer(less[1].input[0]) == count and one is not None and bool((one == 1).all())


def _rows_of_last(scope: Scope, mean: Scope) -> _Value | None:
    """How many rows there are, where a branch gives sum / (rows - start), or the sum of no rows.

    It is the mean of the same range as `mean` gives.
    """
    branch = scope.writer(scope.results[0], "If")
    if branch is None:
        return None
    some, none = _branches(*branch)
    quotient = some.writer(some.results[0], "Div")
    divisor = None if quotient is None else quotient[0].writer(quotient[1].input[1], "Cast")
    length = None if divisor is None else divisor[0].writer(divisor[1].input[0], "Sub")
    above = branch[0].writer(branch[1].input[0], "GT")
    if (
        quotient is None
        or divisor is None
        or length is None
        or above is None
        or mean.writer(mean.results[0], "ReduceMean") is None
    ):
        return None
    zero, total = above[0].constant(above[1].input[1]), quotient[0].place(quotient[1].input[0])
    copied = none.writer(none.results[0], "Copy")
    without = copied[0].place(copied[1].input[0]) if copied is not None else none.place(none.results[0])
    divided, averaged = _part(quotient[0], quotient[1].input[0]), _part(mean, mean.results[0])
    if zero is None or zero.any() or above[0].place(above[1].input[0]) != divisor[0].place(divisor[1].input[0]):
        return None
    if without != total or divided is None or averaged is None or divided[1] is not averaged[1]:
        return None
    if length[0].place(length[1].input[1]) != averaged[0].place(averaged[1].input[1]):
        return None
    return length[0], length[1].input[0]


def _ends_there(draft: Draft, vector: str, scope: Scope, rows: str) -> bool:
    """True where the last element of `vector` is what `rows` is in a scope."""
    joined = draft.producer(vector)
    if joined is None or draft[joined].type != "Concat" or len(draft[joined].input) != 2:
        return False
    last = draft[joined].input[1]
    if scope.outer(rows) == last:
        return True
    first = scope.writer(rows, "Slice")
    if first is not None and len(first[1].input) == 1 and tuple(first[1].arguments("").ints("starts")) == (0,):
        scope, rows = first[0], first[1].input[0]
    shape, measured = draft.producer(last), scope.writer(rows, "Shape")
    if shape is None or draft[shape].type != "Shape" or measured is None:
        return False
    return measured[0].outer(measured[1].input[0]) == draft[shape].input[0]


def _summed(scope: Scope, name: str, number_of: _Number, result: str, last: int, *, keeps_axis: bool) -> _Bags | None:
    """Value `name` as the sum or mean of a range of rows, whose bounds are those of the iteration."""
    reduced = scope.writer(name, "ReduceSum", "ReduceMean")
    if reduced is None:
        return None
    scope, node = reduced
    arguments = node.arguments(node.type)
    if tuple(arguments.ints("axes")) != (0,) or arguments.bool("keepdims", True) is not keeps_axis:
        return None
    rows, indices, wraps = node.input[0], None, False
    picked = scope.writer(rows, "Gather")
    if picked is not None:
        if picked[1].arguments("").int("axis", 0) or picked[1].arguments("").bool("match_outer"):
            return None
        wraps = picked[1].arguments("").bool("wrap_indices", True)
        scope, (rows, indices) = picked[0], picked[1].input
    part = scope.writer(rows if indices is None else indices, "Slice")
    if part is None or not _is_range(part[1]):
        return None
    whole = part[0].outer(part[1].input[0])
    table = whole if indices is None else scope.outer(rows)
    start, end = (_bound(part[0], one, number_of) for one in part[1].input[1:])
    if whole is None or table is None or start is None or end is None:
        return None
    is_mean = node.type == "ReduceMean"
    return _Bags(table, None if indices is None else whole, start, end, result, last, is_mean, wraps)


def _is_range(node: Node) -> bool:
    """True for a slice along the first axis, with bounds that are inputs."""
    arguments = node.arguments(node.type)
    is_first = tuple(arguments.ints("axes") or (0,)) == (0,) and "steps" not in arguments
    return len(node.input) == 3 and is_first and arguments.bool("onnx_style")


def _bound(scope: Scope, name: str, number_of: _Number) -> _Bound | None:
    """The vector that a bound is taken from by the number of the iteration."""
    made = scope.writer(name, "ExpandDims", "Slice")
    if made is None:
        return None
    scope, node = made
    if node.type == "ExpandDims":
        picked = scope.writer(node.input[0], "Gather")
        if picked is None or picked[1].arguments("").int("axis", 0) or picked[1].arguments("").bool("match_outer"):
            return None
        scope, node = picked
        first = number_of(scope, node.input[1])
    else:
        if not _is_range(node):
            return None
        first, behind = (number_of(scope, one) for one in node.input[1:])
        if first is None or behind != first + 1:
            return None
    vector = scope.outer(node.input[0])
    return None if vector is None or first is None else (vector, first)


def _picked_before(draft: Draft, bags: _Bags, types: Types) -> _Bags:
    """The same on the table that rows were picked from before the loop, each perhaps times 1."""
    number = draft.producer(bags.rows)
    if bags.indices is not None or number is None:
        return bags
    if draft[number].type == "Mul":
        for one, other in (draft[number].input, draft[number].input[::-1]):
            if types.get(one) == types.get(bags.rows) and one in types and _is_of_ones(draft, other):
                number = draft.producer(one)
                break
    if number is None or draft[number].type != "Gather":
        return bags
    arguments, (rows, indices) = draft.arguments(number), draft[number].input
    kind = types.get(indices)
    if arguments.int("axis", 0) or arguments.bool("match_outer") or kind is None or kind.rank != 1:
        return bags
    return replace(bags, rows=rows, indices=indices, wraps=arguments.bool("wrap_indices", True))


def _is_of_ones(draft: Draft, name: str) -> bool:
    """True for a blob that is a constant 1 in all places."""
    value, number = draft.constant(name), draft.producer(name)
    if value is not None:
        return bool((value == 1).all())
    repeats = number is not None and draft[number].type in ("ExpandDims", "Expand", "Reshape")
    return number is not None and repeats and _is_of_ones(draft, draft[number].input[0])


PASS = Pass(
    "embedding-bags",
    "Loops that sum a range of rows in each iteration become one operator.",
    edit,
    needs=(_is_loop,),
)
