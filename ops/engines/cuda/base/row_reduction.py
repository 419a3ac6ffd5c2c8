"""Reductions on CUDA from a few lines of C++: groups of elements summed, or whatever else joins, then mapped.

A tensor is seen under a shape of which some axes are reduced: what shares its indices along the others is a group. A
`Phase` says what a thread does with each element of its group, and how what two threads have found is joined. Other
tensors broadcast to the shape, as NumPy's do. Three forms come from one description:

- some lanes of a block share a group, and several groups share a block, so that neighboring threads read neighboring
  elements whether the last axis is reduced (rows) or kept (columns);
- few long groups are cut in pieces, a block each, whose results another launch joins;
- with a map over the elements, all is one launch, unless groups are few and long.

What a thread adds up and how results are joined depend on sizes alone, never on the device or on its schedule, so the
bytes of a result are the same everywhere.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from dagexec.core.operator import Step, in_sequence, nothing_to_do
from dagexec.errors import ShapeError
from dagexec.ops.engines.cuda.base.expression import c_type_of_scalar
from dagexec.ops.engines.cuda.base.formulas import FORMULAS
from dagexec.ops.engines.cuda.base.operator import Array, CudaOperator, c_type_of
from dagexec.platform.records import dataclass

MAX_AXES = 8
THREADS = 256
_WARP = 32
_CHAIN, _FUSED_CHAIN, _MAP_CHAIN = 64, 256, 8  # elements a thread may work on before its group is cut
_MIN_CHAIN = 16
_ENOUGH_BLOCKS, _MAX_BLOCKS, _MAX_PIECES = 1024, 2048, 1024

STATES = r"""
__device__ inline i64 whole_part(i64 a, i64 b) { return (a | b) >> 31 ? a / b : (i64)((u32)a / (u32)b); }
template <class T> struct accumulated { typedef u64 type; };
template <> struct accumulated<float> { typedef double type; };
template <> struct accumulated<double> { typedef double type; };
template <> struct accumulated<half_t> { typedef float type; };
template <> struct accumulated<bfloat_t> { typedef float type; };
template <class W> struct sum_of {
    W total;
    __device__ void begin() { total = W(0); }
    __device__ void add(W x) { total = total + x; }
    __device__ void join(const sum_of& other) { total = total + other.total; }
};
template <class P, class Q> struct both_of {
    P one; Q other;
    __device__ void begin() { one.begin(); other.begin(); }
    __device__ void join(const both_of& more) { one.join(more.one); other.join(more.other); }
};
template <class W> struct two_sums {
    W one, other;
    __device__ void begin() { one = W(0); other = W(0); }
    __device__ void add(W x, W y) { one = one + x; other = other + y; }
    __device__ void join(const two_sums& more) { one = one + more.one; other = other + more.other; }
};
template <class W> struct product_of {
    W total;
    __device__ void begin() { total = W(1); }
    __device__ void add(W x) { total = total * x; }
    __device__ void join(const product_of& other) { total = total * other.total; }
};
template <class A> struct max_of {
    A value; bool any;
    __device__ void begin() { value = A(0); any = false; }
    __device__ void add(A x) { value = any ? nan_max(value, x) : x; any = true; }
    __device__ void join(const max_of& other) { if (other.any) add(other.value); }
};
template <class A> struct min_of {
    A value; bool any;
    __device__ void begin() { value = A(0); any = false; }
    __device__ void add(A x) { value = any ? nan_min(value, x) : x; any = true; }
    __device__ void join(const min_of& other) { if (other.any) add(other.value); }
};
template <class A> __device__ inline bool comes_before(A a, i64 at_a, A b, i64 at_b) {
    if (is_nan(a) || is_nan(b)) return is_nan(a) && is_nan(b) ? at_a < at_b : is_nan(a);
    return a > b || (a == b && at_a < at_b);
}
template <class A> struct argmax_of {
    A value; i64 place;
    __device__ void begin() { value = A(0); place = -1; }
    __device__ void add(A x, i64 at) { if (place < 0 || comes_before(x, at, value, place)) { value = x; place = at; } }
    __device__ void join(const argmax_of& other) { if (other.place >= 0) add(other.value, other.place); }
};
template <class A> struct argmin_of {
    A value; i64 place;
    __device__ void begin() { value = A(0); place = -1; }
    __device__ void add(A x, i64 at) {
        const bool nan = is_nan(x) || (place >= 0 && is_nan(value));
        if (place < 0 || (nan ? comes_before(x, at, value, place) : x < value || (x == value && at < place))) {
            value = x;
            place = at;
        }
    }
    __device__ void join(const argmin_of& other) { if (other.place >= 0) add(other.value, other.place); }
};
"""
"""States of phases. `accumulated<T>` is what elements of type T are summed in; integers wrap, as unsigned ones do.

`whole_part` is a quotient of numbers that are not negative, without a 64-bit division where it can.
"""


@dataclass(frozen=True)
class Phase:
    """One pass over the elements of a group.

    Attributes:
        state: the C++ type of what is found, with `begin()` and `join(other)`; see STATES.
        absorb: statements that put one element into state `s`.
        after: statements that declare constants from `totalN`, the state of the group, for phase number N.
        size: the size of a state in bytes, or more.
    """

    state: str
    absorb: str
    after: str = ""
    size: int = 16


@dataclass(frozen=True)
class Groups:
    """The statements of a computation by groups.

    In all of them an operand's name is its element, `name_p` its pointer, `A` and `W` are the types in which elements
    of the first operand are computed and summed, `o` is the number of the group, `w.length` the elements in it. Where
    there is an element, `r` is its number in the group and `name_at` its place. Outside, operands with an element a
    group have their names, and `name_base` is the place of a group's first element.

    Attributes:
        phases: passes over the elements, one after another.
        before: statements before the first phase.
        each: statements for every element, after all phases; they may assign outputs.
        last: statements for every group, at the end; likewise.
        helpers: C++ before the kernel.
    """

    phases: Sequence[Phase] = ()
    before: str = ""
    each: str = ""
    last: str = ""
    helpers: str = ""


def by_groups(
    operator: CudaOperator,
    name: str,
    shape: tuple[int, ...],
    axes: Sequence[int],
    groups: Groups,
    inputs: Mapping[str, Array],
    outputs: Mapping[str, Array],
    scalars: Mapping[str, np.generic] | None = None,
) -> Step:
    """A step that computes `groups` over `axes` of arrays that broadcast to `shape`.

    An output may be the memory of an input of the same shape. `scalars` are passed by value, under their names.
    Raises ShapeError for more than MAX_AXES axes that cannot be joined.
    """
    operands = {**inputs, **outputs}
    walk = Walk.over(shape, axes, operands)
    if not walk.outputs:
        return nothing_to_do
    source = _Source(name, groups, inputs, outputs, scalars or {}, walk)
    return source.step(operator)


@dataclass(frozen=True)
class Walk:
    """How threads walk over groups.

    Attributes:
        kept, slow, fast: sizes of the kept axes, and of the reduced ones but the last, and of that.
        layouts: the strides along them, in elements, of arrays that are alike.
        layout_of: which of these an operand has.
        row: the last axis is reduced, so neighboring threads take elements of one group.
    """

    kept: tuple[int, ...]
    slow: tuple[int, ...]
    fast: int
    layouts: tuple[tuple[tuple[int, ...], tuple[int, ...], int], ...]
    layout_of: Mapping[str, int]
    row: bool

    @classmethod
    def over(cls, shape: tuple[int, ...], axes: Sequence[int], operands: Mapping[str, Array]) -> Walk:
        """The walk over arrays broadcast to `shape`, in as few axes as say the same."""
        strides = {key: broadcast_strides(array, shape) for key, array in operands.items()}
        kinds = list(dict.fromkeys(strides.values()))
        reduced = {axis % len(shape) for axis in axes} if shape else set()
        sizes: list[int] = []
        is_reduced: list[bool] = []
        rows: list[list[int]] = [[] for _ in kinds]
        for axis, size in enumerate(shape):
            if size == 1:
                continue
            steps = [kind[axis] for kind in kinds]
            kind = axis in reduced
            if (
                sizes
                and is_reduced[-1] == kind
                and all(row[-1] == step * size for row, step in zip(rows, steps, strict=True))
            ):
                sizes[-1] *= size
                for row, step in zip(rows, steps, strict=True):
                    row[-1] = step
                continue
            sizes.append(size)
            is_reduced.append(kind)
            for row, step in zip(rows, steps, strict=True):
                row.append(step)
        kept = [index for index, kind in enumerate(is_reduced) if not kind]
        walked = [index for index, kind in enumerate(is_reduced) if kind]
        if max(len(kept), len(walked)) > MAX_AXES:
            raise ShapeError(f"a reduction over {shape} along {tuple(axes)} has more than {MAX_AXES} separate axes")
        slow = walked[:-1]
        layouts = tuple(
            (
                tuple(row[index] for index in kept),
                tuple(row[index] for index in slow),
                row[walked[-1]] if walked else 0,
            )
            for row in rows
        )
        return cls(
            tuple(sizes[index] for index in kept),
            tuple(sizes[index] for index in slow),
            sizes[walked[-1]] if walked else 1,
            layouts,
            {key: kinds.index(found) for key, found in strides.items()},
            bool(is_reduced and is_reduced[-1]) or not kept,
        )

    @property
    def outputs(self) -> int:
        """How many groups there are."""
        return prod(self.kept)

    @property
    def length(self) -> int:
        """Elements of a group."""
        return prod(self.slow) * self.fast

    def is_of_groups(self, name: str) -> bool:
        """The operand has one element a group."""
        _, slow, fast = self.layouts[self.layout_of[name]]
        return not any(slow) and not fast

    def numbers(self, lanes: int, row: bool, piece: int, pieces: int) -> npt.NDArray[np.int64]:
        """The argument `w` of a kernel."""

        def padded(values: Sequence[int], fill: int = 0) -> list[int]:
            return [*values, *[fill] * (MAX_AXES - len(values))]

        found = [self.outputs, self.length, piece, pieces, lanes, int(row), len(self.kept), len(self.slow)]
        found += [max(1, self.fast), *padded(self.kept, 1), *padded([max(1, size) for size in self.slow], 1)]
        for kept, slow, fast in self.layouts:
            found += [fast, *padded(kept), *padded(slow)]
        return np.array(found, np.int64)


def broadcast_strides(array: Array, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides, in elements, with which an array is read over `shape`: 0 along axes it is stretched over."""
    missing = len(shape) - array.ndim
    return tuple(
        0 if axis < missing or array.shape[axis - missing] == 1 else array.strides[axis - missing] // array.itemsize
        for axis in range(len(shape))
    )


@dataclass(frozen=True)
class _Cut:
    """How a launch shares its work: `lanes` threads a group, `width` groups a block, pieces of `piece` elements."""

    lanes: int
    width: int
    row: bool
    piece: int
    pieces: int

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.lanes * self.width

    @classmethod
    def of(cls, outputs: int, length: int, row: bool, chain: int | None) -> _Cut:
        """For groups of `length`, cut where a thread would get more than `chain` elements, if that is given."""
        if row:
            lanes = min(THREADS, _power_of_two(length))
        else:
            lanes = min(THREADS // min(_WARP, _power_of_two(outputs)), _power_of_two(length))
        width = min(THREADS // lanes, _power_of_two(outputs))
        blocks = -(-outputs // width)
        found = cls(lanes, width, row, max(1, length), 1)
        if chain is None or length <= chain * lanes or blocks >= _ENOUGH_BLOCKS:
            return found
        pieces = min(-(-length // (min(chain, _MIN_CHAIN) * lanes)), -(-_MAX_BLOCKS // blocks), _MAX_PIECES)
        piece = -(-length // pieces)
        piece = -(-piece // lanes) * lanes
        return replace(found, piece=piece, pieces=-(-length // piece))


def _power_of_two(size: int) -> int:
    """The least power of two that is no less than `size`."""
    return 1 << max(0, size - 1).bit_length()


class _Source:
    """The kernels of one computation."""

    def __init__(
        self,
        name: str,
        groups: Groups,
        inputs: Mapping[str, Array],
        outputs: Mapping[str, Array],
        scalars: Mapping[str, np.generic],
        walk: Walk,
    ) -> None:
        self._name, self._groups, self._walk = name, groups, walk
        self._inputs, self._outputs, self._scalars = inputs, outputs, scalars
        self._of_groups = {key for key, array in inputs.items() if array.size and walk.is_of_groups(key)}

    def step(self, operator: CudaOperator) -> Step:
        """The launches."""
        groups, walk = self._groups, self._walk
        single = len(groups.phases) == 1 and not groups.each
        chain = _CHAIN if single else _FUSED_CHAIN if groups.phases else _MAP_CHAIN
        cut = _Cut.of(walk.outputs, walk.length, walk.row, chain)
        if cut.pieces == 1 or not groups.phases:
            return self._launch(operator, "whole", cut, self._whole(), {})
        steps: list[Step] = []
        totals: dict[str, Any] = {}
        for number, phase in enumerate(groups.phases):
            state, finishing = f"state{number}", number == len(groups.phases) - 1 and not groups.each
            pieces = {f"{state}* pieces": operator.scratch((walk.outputs * cut.pieces * phase.size,), np.uint8)}
            steps.append(self._launch(operator, f"piece{number}", cut, self._piece(number), totals | pieces))
            joining = _Cut.of(walk.outputs, cut.pieces, True, None)
            if finishing:
                body = [*self._joined(number), *self._last()]
                steps.append(self._launch(operator, f"join{number}", joining, body, totals | pieces, cut.pieces))
                continue
            found = operator.scratch((walk.outputs * phase.size,), np.uint8)
            memory = totals | pieces | {f"{state}* found": found}
            body = [*self._joined(number), f"if (live && lane == 0) found[o] = total{number};"]
            steps.append(self._launch(operator, f"join{number}", joining, body, memory, cut.pieces))
            totals[f"const {state}* totals{number}"] = found
        if groups.each:
            mapping = _Cut.of(walk.outputs, walk.length, walk.row, _MAP_CHAIN)
            body = [*self._loaded(len(groups.phases)), *self._loop(groups.each), *self._last()]
            steps.append(self._launch(operator, "map", mapping, body, totals))
        return in_sequence(steps)

    def _launch(
        self,
        operator: CudaOperator,
        kind: str,
        cut: _Cut,
        body: Iterable[str],
        memory: Mapping[str, Any],
        pieces: int = 1,
    ) -> Step:
        """`memory` are the parameters and arguments after the operands: states. `pieces` are to be joined."""
        walk, kernel = self._walk, f"{self._name}_{kind}"
        numbers = walk.numbers(cut.lanes, cut.row, cut.piece, max(pieces, cut.pieces))
        return operator.launch(
            kernel,
            self._code(kernel, body, memory),
            [*self._inputs.values(), *self._outputs.values(), *self._scalars.values(), *memory.values(), numbers],
            blocks=(-(-walk.outputs // cut.width), cut.pieces, 1),
            threads=cut.threads,
        )

    def _code(self, kernel: str, body: Iterable[str], memory: Iterable[str]) -> str:
        first = c_type_of(next(iter({**self._inputs, **self._outputs}.values())))
        parameters = [f"const {c_type_of(array)}* {key}_p" for key, array in self._inputs.items()]
        parameters += [f"{c_type_of(array)}* {key}_p" for key, array in self._outputs.items()]
        parameters += [f"{c_type_of_scalar(value)} {key}" for key, value in self._scalars.items()]
        states = "".join(f"typedef {phase.state} state{index};\n" for index, phase in enumerate(self._groups.phases))
        axes = f"[{MAX_AXES}]"
        lines = "\n    ".join([*self._prologue(), *body])
        return (
            f"{FORMULAS}{STATES}typedef computed<{first}>::type A;\ntypedef accumulated<{first}>::type W;\n"
            f"{self._groups.helpers}\n{states}"
            f"struct layout_t {{ i64 fast, kept{axes}, slow{axes}; }};\n"
            "struct walk_t { i64 outputs, length, piece, pieces, lanes, row, kept_axes, slow_axes, fast, "
            f"kept{axes}, slow{axes}; layout_t of[{len(self._walk.layouts)}]; }};\n"
            f'extern "C" __global__ void {kernel}({", ".join([*parameters, *memory, "BY_VALUE walk_t w"])}) {{\n'
            f"    {lines}\n}}\n"
        )

    def _prologue(self) -> Iterator[str]:
        """Which group and which elements of it are a thread's."""
        layouts = range(len(self._walk.layouts))
        yield "const int lanes = (int)w.lanes, width = (int)blockDim.x / lanes, t = (int)threadIdx.x;"
        yield "const int lane = w.row ? t % lanes : t / width, column = w.row ? t / lanes : t % width;"
        yield "const i64 number = (i64)blockIdx.x * width + column;"
        yield "const bool live = number < w.outputs;"
        yield "const i64 o = live ? number : 0;"
        yield "const i64 first = (i64)blockIdx.y * w.piece;"
        yield "const i64 end = live ? (first + w.piece < w.length ? first + w.piece : w.length) : 0;"
        yield "i64 " + ", ".join(f"base{index} = 0" for index in layouts) + ";"
        moves = " ".join(f"base{index} += digit * w.of[{index}].kept[d];" for index in layouts)
        yield "{ i64 rest = o;"
        yield "for (int d = (int)w.kept_axes - 1; d >= 0; --d) {"
        yield "const i64 above = d ? whole_part(rest, w.kept[d]) : 0, digit = rest - above * w.kept[d]; rest = above;"
        yield f"{moves} }} }}"
        for key, index in self._walk.layout_of.items():
            yield f"const i64 {key}_base = base{index};"
        for key in self._inputs:
            if key in self._of_groups and _mentions(self._before_last, key):
                yield f"const auto {key} = live ? get({key}_p, {key}_base) : decltype(get({key}_p, 0))(0);"
        yield self._groups.before

    @property
    def _before_last(self) -> str:
        """All statements but those for every group at the end."""
        groups = self._groups
        texts = [text for phase in groups.phases for text in (phase.absorb, phase.after)]
        return " ".join([groups.before, *texts, groups.each])

    def _whole(self) -> Iterator[str]:
        """All phases, the map and the end, by a block that has whole groups."""
        for number, phase in enumerate(self._groups.phases):
            yield from self._found(number, self._loop(phase.absorb))
            yield phase.after
        if self._groups.each:
            yield from self._loop(self._groups.each)
        yield from self._last()

    def _piece(self, number: int) -> Iterator[str]:
        """Phase `number` of a piece of each group."""
        yield from self._loaded(number)
        yield from self._found(number, self._loop(self._groups.phases[number].absorb))
        yield f"if (live && lane == 0) pieces[o * w.pieces + blockIdx.y] = total{number};"

    def _joined(self, number: int) -> Iterator[str]:
        """Phase `number`, from its pieces."""
        yield from self._loaded(number)
        joining = "if (live) for (i64 i = lane; i < w.pieces; i += lanes) s.join(pieces[o * w.pieces + i]);"
        yield from self._found(number, [joining])
        yield self._groups.phases[number].after

    def _loaded(self, count: int) -> Iterator[str]:
        """The first `count` phases, computed before."""
        for number, phase in enumerate(self._groups.phases[:count]):
            yield f"const state{number} total{number} = totals{number}[o];"
            yield phase.after

    @staticmethod
    def _found(number: int, absorbing: Iterable[str]) -> Iterator[str]:
        """The state `totalN` of a group, from those of its lanes, joined as a tree."""
        own, other = f"shared{number}[lane * width + column]", f"shared{number}[(lane + half) * width + column]"
        yield f"__shared__ state{number} shared{number}[{THREADS}];"
        yield f"{{ state{number} s; s.begin();"
        yield from absorbing
        yield f"{own} = s; }}"
        yield "__syncthreads();"
        yield "for (int half = lanes / 2; half; half /= 2) {"
        yield f"if (lane < half) {own}.join({other});"
        yield "__syncthreads(); }"
        yield f"const state{number} total{number} = shared{number}[column];"

    def _loop(self, statements: str) -> Iterator[str]:
        """Statements for each element of a thread."""
        layouts = range(len(self._walk.layouts))
        yield "{ i64 slow = whole_part(first + lane, w.fast), fast = first + lane - slow * w.fast;"
        yield "const i64 next_slow = whole_part(lanes, w.fast), next_fast = lanes - next_slow * w.fast;"
        yield "for (i64 r = first + lane; r < end; r += lanes) {"
        for index in layouts:
            yield f"    i64 at{index} = base{index} + fast * w.of[{index}].fast;"
        moves = " ".join(f"at{index} += digit * w.of[{index}].slow[d];" for index in layouts)
        yield "    { i64 rest = slow;"
        yield "    for (int d = (int)w.slow_axes - 1; d >= 0; --d) {"
        yield "    const i64 above = d ? whole_part(rest, w.slow[d]) : 0, digit = rest - above * w.slow[d];"
        yield "    rest = above;"
        yield f"    {moves} }} }}"
        yield "    fast += next_fast; slow += next_slow; if (fast >= w.fast) { fast -= w.fast; ++slow; }"
        for key, index in self._walk.layout_of.items():
            if re.search(rf"\b{key}(_at)?\b", statements):
                yield f"    const i64 {key}_at = at{index};"
        for key in self._inputs:
            if key not in self._of_groups and _mentions(statements, key):
                yield f"    const auto {key} = get({key}_p, {key}_at);"
        yield from self._assigned(statements, "at")
        yield "} }"

    def _last(self) -> Iterator[str]:
        """Statements for each group, by one thread."""
        if self._groups.last:
            yield "if (live && lane == 0 && blockIdx.y == 0) {"
            for key in self._inputs:
                if _mentions(self._groups.last, key) and not _mentions(self._before_last, key):
                    yield f"    const auto {key} = get({key}_p, {key}_base);"
            yield from self._assigned(self._groups.last, "base")
            yield "}"

    def _assigned(self, statements: str, place: str) -> Iterator[str]:
        """Statements that may assign outputs, each a variable."""
        written = [key for key in self._outputs if _mentions(statements, key)]
        for key in written:
            yield f"    computed<{c_type_of(self._outputs[key])}>::type {key};"
        yield f"    {statements}"
        for key in written:
            yield f"    put({key}_p, {key}_{place}, {key});"


def _mentions(statements: str, name: str) -> bool:
    return re.search(rf"\b{name}\b", statements) is not None
