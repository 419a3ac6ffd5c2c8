"""What one primitive is to compute, the implementations that the library offers for it, and the steps around each.

A Problem is made by an operator for the tensors it has. A Candidate is an implementation that may compute it, in the
layout of those tensors or in layouts of its own, with copies before and after.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from math import prod
from typing import Protocol

import numpy as np

from dagexec.core.dtypes import TypeMeta
from dagexec.core.operator import Step, nothing_to_do
from dagexec.errors import UnsupportedFeatureError
from dagexec.ops.engines.onednn.binding import Library
from dagexec.ops.engines.onednn.bound import Rebindable
from dagexec.ops.engines.onednn.descriptors import POST_OP, SCRATCHPAD, WEIGHTS, Array, Descriptor, aligned_empty
from dagexec.ops.engines.onednn.division import adds_up_alike, misreads
from dagexec.ops.engines.onednn.operator import reorder
from dagexec.ops.engines.onednn.packing import Making
from dagexec.ops.engines.onednn.primitive import EXEC_ARG_MD, SCRATCHPAD_MD, PrimitiveDescriptor
from dagexec.ops.kernels.moving import NativeRows, TableRebind, rebind_in
from dagexec.platform.records import dataclass

DIRECT, WINOGRAD = "direct", "winograd"
COMPOSED = "composed "
"""How names of candidates begin that are not a single primitive."""


_LINE = 64  # bytes
_GENERATIONS = ((3, "avx512"), (2, "avx2"), (1, "avx"))
NEWEST = {16: 3, 8: 2}
"""By the float32 numbers in a vector of the instruction set, the newest generation there can be."""

Ask = Callable[[str, bool], PrimitiveDescriptor]
"""Asks the library, for an algorithm, and whether it may choose layouts of its own.

Raises UnsupportedFeatureError when there is none.
"""


class Pack(Protocol):
    """A constant argument in another layout, and the step that brings it there in a run."""

    def __call__(
        self,
        number: int,
        array: Array,
        source: Descriptor,
        target: Descriptor,
        making: Making | None = None,
        /,
    ) -> tuple[Array, Step]:
        """By argument number, array and layouts, or by what fills it, where that is given."""


Memory = Callable[[int], Array]
"""Gives bytes for copies and working memory."""

Assemble = Callable[["Problem", Mapping[int, Array], Memory, Pack], "Assembled"]
"""Makes the steps of a candidate that is more than a primitive and copies, as `assemble` does."""


@dataclass(frozen=True)
class Problem:
    """What is to be computed.

    Attributes:
        library: oneDNN.
        label: how messages name the operator.
        key: all that a choice of implementation depends on, beside library and processor, the batch last.
        ask: how the library is asked.
        tensors: by argument number, the layout and element type of each tensor as the operator has it.
        result: the argument that is computed.
        plain: of arguments that are `packed`, the layout of a packed copy.
        packed: arguments that are in another layout for longer than a run when their values never change.
        constant: those of `packed` whose values never change.
        taps: elements of the window.
        fan_in: products that are summed up for one element of the result.
        algorithms: those that may be requested, in order of preference when nothing is measured.
        own_layouts: True when an implementation may use layouts of its own, with copies before and after.
        limit: the most bytes of scratchpad.
        cold: True when the weights come from memory in a run, because those of the net do not fit in the caches.
        batch: images, or rows.
        places: spatial sizes of what the window is laid on.
        ragged: True when channels do not fill vectors of 16, so that implementations with vectors of 8 may be faster.
        views: of algorithms that see an argument in other axes, its layout there.
        open: True when general implementations may be faster than others, as in products of few rows.
        groups: of a convolution.
        composed: further candidates, made of more than a primitive and copies.
        invariant: only candidates are offered that are batch-invariant.
        padding: columns beside an image that a convolution takes for zeros, on the side that has more.
        blocks: of channels that are written, along which alone the library's implementations are cut; 0 where there are
            other ways.
    """

    library: Library
    label: str
    key: str
    ask: Ask
    tensors: Mapping[int, tuple[Descriptor, TypeMeta]]
    result: int
    plain: Mapping[int, Descriptor]
    packed: frozenset[int]
    constant: frozenset[int]
    taps: int
    fan_in: int
    algorithms: tuple[str, ...] = (DIRECT, WINOGRAD)
    own_layouts: bool = False
    limit: int = 1 << 62
    cold: bool = True
    batch: int = 1
    places: tuple[int, ...] = ()
    ragged: bool = False
    open: bool = False
    views: Mapping[str, Mapping[int, Descriptor]] = field(default_factory=dict)
    groups: int = 1
    composed: Callable[[], Iterable[Candidate | Asked]] | None = None
    invariant: bool = False
    padding: int = 0
    blocks: int = 0

    def answered(self, label: str) -> Problem:
        """It for an operator that messages call so, where nothing is to be asked any more: no tensor is behind it."""
        return replace(self, label=label, ask=_never, composed=None)

    def layouts(self, name: str) -> dict[int, Descriptor]:
        """The layouts of all tensors, as the candidate of that name sees them."""
        found = {number: layout for number, (layout, _) in self.tensors.items()}
        for algorithm, views in self.views.items():
            if name.startswith((_prefix(algorithm, False), _prefix(algorithm, True))):
                found |= views
        return found

    @property
    def geometry(self) -> str:
        """All that a choice of implementation depends on but the batch."""
        return self.key.rpartition(" | ")[0]

    @property
    def weights_nbytes(self) -> int:
        """Bytes of the weights; 0 where they are the result."""
        return self.tensors[WEIGHTS][0].nbytes if WEIGHTS in self.tensors else 0

    def products(self, tile: int = 1) -> int:
        """Products that are summed up, as if the image were made of whole tiles of so many pixels a side."""
        (filters,) = self.plain
        descriptor, meta = self.tensors[filters]
        places = prod(-(-size // tile) * tile for size in self.places)
        return self.batch * places * (descriptor.nbytes // meta.itemsize)

    def candidates(self, algorithm: str | None = None) -> Iterator[Candidate]:
        """Every implementation once, of one algorithm or all, those for the operator's own layouts first."""
        wanted = self.algorithms if algorithm is None else tuple({algorithm}.intersection(self.algorithms))
        for own in (False, True) if self.own_layouts else (False,):
            for one in wanted:
                yield from self._offered(one, own)
        if algorithm in (None, WINOGRAD):
            yield from filter(None, (one.find() for one in self.all_composed()))

    def all_composed(self) -> Iterator[Candidate | Asked]:
        """Those made of more than a primitive, not all of which need exist."""
        yield from () if self.composed is None else self.composed()

    def named(self, name: str) -> Candidate | None:
        """The candidate of a name; None when there is none."""
        if name.startswith(COMPOSED):
            alike = (one.find() for one in self.all_composed() if name.startswith(one.likely.name))
            return next((one for one in alike if one is not None and one.name == name), None)
        for own in (False, True) if self.own_layouts else (False,):
            for algorithm in self.algorithms:
                if name.startswith(_prefix(algorithm, own)):
                    return next((one for one in self._offered(algorithm, own) if one.name == name), None)
        return None

    def _offered(self, algorithm: str, own: bool) -> Iterator[Candidate]:
        try:
            first = self.ask(algorithm, own)
        except UnsupportedFeatureError:
            return
        seen = set()
        for description in first.implementations():
            name = _prefix(algorithm, own) + description.name
            found = Candidate(name, description)
            wanted = (found.is_batch_invariant or not self.invariant) and not misreads(description.name, self.padding)
            if name not in seen and wanted and description.scratchpad_bytes <= self.limit:
                yield found
            seen.add(name)


def _never(_algorithm: str, _own: bool) -> PrimitiveDescriptor:
    raise AssertionError("a problem that is answered")


def own_layout(algorithm: str) -> str:
    """How names of candidates begin that have layouts of their own."""
    return _prefix(algorithm, True)


def _prefix(algorithm: str, own: bool) -> str:
    return f"{'own layout, ' if own else ''}{algorithm} "


@dataclass(frozen=True)
class Candidate:
    """An implementation that may compute a problem.

    Attributes:
        name: for choices and messages.
        description: the primitive; None where there is none.
        assemble: how its steps are made, where the primitive is only a part of them.
        seconds: the estimate for one run on one core, where `implementation` has none for it.
        is_in_pieces: its steps are pieces of all images, whose bytes do not depend on other images.
        keeps_nan: what is no number stays none where it is read, and nowhere else.
        products: by how many times its products are more than those of the problem, where they are not those.
    """

    name: str
    description: PrimitiveDescriptor | None
    assemble: Assemble | None = None
    seconds: float | None = None
    products: int = 0
    is_in_pieces: bool = False
    keeps_nan: bool = False

    @property
    def likely(self) -> Candidate:
        """It, as `Asked` has it."""
        return self

    def find(self) -> Candidate:
        """It, likewise."""
        return self

    @property
    def primitive(self) -> PrimitiveDescriptor:
        """The primitive, of one that has one."""
        assert self.description is not None, f"{self.name} has no primitive"
        return self.description

    @property
    def is_composed(self) -> bool:
        """True for one that is more than a primitive and copies."""
        return self.assemble is not None

    @property
    def has_own_layout(self) -> bool:
        """True for one with layouts of its own."""
        return self.name.startswith(_prefix("", True).rstrip())

    @property
    def is_reference(self) -> bool:
        """True for the library's plain loops, which are slow."""
        return self.description is not None and self.description.is_reference

    @property
    def is_general(self) -> bool:
        """True for those that are not made for the geometry: plain loops, and matrix products on unrolled windows."""
        return self.is_reference or "gemm" in self._name_in_library.replace("brgemm", "")

    @property
    def is_divisible(self) -> bool:
        """True for a convolution whose sums have one order however the images of a batch are divided."""
        return self.description is not None and adds_up_alike(self.description.name)

    @property
    def most_pieces(self) -> int:
        """In how many pieces of channels it may be cut: Winograd's algorithms transform the image for each."""
        return 2 if "wino" in self._name_in_library else 8

    @property
    def is_batch_invariant(self) -> bool:
        """True for a product where a row of the result has the same bytes whatever the other rows.

        The blocks of `brg` and `brgemm` follow from the length of the sums (`division`); those of general products are
        others for some numbers of rows.
        """
        return not self.is_general

    @property
    def _name_in_library(self) -> str:
        """The name of the primitive, empty where there is none."""
        return "" if self.description is None else self.description.name

    @property
    def generation(self) -> int:
        """How new the instructions are that it needs: older ones are not faster where channels fill vectors of 16."""
        isa = self.name.rpartition(":")[2]
        return next((number for number, name in _GENERATIONS if isa.startswith(name)), 0)


@dataclass(frozen=True)
class Asked:
    """A candidate of which only the library knows whether it exists, and that it is asked for where it may be chosen.

    Attributes:
        likely: what it would be, without a primitive; its name is how the name begins.
        find: asks; None where there is none.
    """

    likely: Candidate
    find: Callable[[], Candidate | None]


def in_plain_order(problem: Problem, filters: Array) -> Array:
    """The numbers of a float32 filter in the order M, C/G, kernel, one after another; not to be written to."""
    if filters.flags.c_contiguous and filters.dtype == np.float32:
        return filters
    layout, given = problem.plain[WEIGHTS], problem.tensors[WEIGHTS][0]
    plain = aligned_empty(layout.nbytes)
    values: Array = plain.view(np.float32)
    try:
        reorder(problem.library, problem.label, given, layout, filters, plain, aligned_empty).run_once()
    except UnsupportedFeatureError:  # the library has no such copy
        np.copyto(values.reshape(filters.shape), filters)
    return values


def on_lines(nbytes: int) -> int:
    """So many bytes as whole lines of a cache."""
    return -(-nbytes // _LINE) * _LINE


def joined(memory: Memory, nbytes: int) -> Memory:
    """Gives parts of one array of so many bytes, as long as there are some: one is placed faster than many."""
    if not nbytes:
        return memory
    array, taken = memory(nbytes), 0

    def part(nbytes: int) -> Array:
        nonlocal taken
        start, taken = taken, taken + on_lines(nbytes)
        return array[start : start + nbytes] if taken <= len(array) else memory(nbytes)

    return part


def in_one(memory: Memory, sizes: Sequence[int]) -> list[Array]:
    """Bytes of each of the sizes, on cache lines of one array."""
    return [*map(joined(memory, sum(map(on_lines, sizes))), sizes)]


class StillArguments:
    """Arguments that stay where they are."""

    def move(self, number: int, array: Array) -> None:
        """Nobody asks for it: no argument is `direct`, and weights are not measured from elsewhere."""
        raise AssertionError(f"argument {number} cannot move")

    def nbytes(self, number: int) -> int:
        """More than could move."""
        return 1 << 62


class MovedArguments(StillArguments):
    """Arguments that calls in tables have addresses in; others stay where they are.

    Attributes:
        numbers: of those that a caller's arrays may take the place of: weights are packed.
    """

    def __init__(self, tables: Sequence[NativeRows], arrays: Mapping[int, Array]) -> None:
        self._tables, self._arrays = tables, arrays
        self._rebinds: dict[int, TableRebind | None] = {}
        self.numbers = frozenset(arrays) - {WEIGHTS}

    def move(self, number: int, array: Array) -> None:
        if number not in self._rebinds:
            self._rebinds[number] = rebind_in(self._tables, self._arrays[number])
        rebind = self._rebinds[number]
        if rebind is not None:
            rebind(array)

    def nbytes(self, number: int) -> int:
        return self._arrays[number].nbytes if number in self._arrays else super().nbytes(number)


@dataclass(frozen=True)
class Assembled:
    """A primitive on memory with the copies it needs.

    Attributes:
        steps: what a run calls, in order.
        bound: the primitive.
        direct: the arguments that are the operator's own tensors.
        nbytes: of what the steps keep, beside primitives.
    """

    steps: list[Step]
    bound: Rebindable
    direct: frozenset[int]
    nbytes: int = 0


def assemble(
    problem: Problem,
    candidate: Candidate,
    arrays: Mapping[int, Array],
    memory: Memory,
    pack: Pack,
) -> Assembled:
    """The candidate on `arrays`, by argument number."""
    if candidate.assemble is not None:
        return candidate.assemble(problem, arrays, memory, pack)
    description, layouts = candidate.primitive, problem.layouts(candidate.name)
    before: list[Step] = []
    after: list[Step] = []
    arguments: dict[int, tuple[Descriptor, Array]] = {}
    direct = set()
    for number, array in arrays.items():
        layout = layouts[number]
        if number >= POST_OP or description.wants(EXEC_ARG_MD, number, layout):
            direct.add(number)
            arguments[number] = (layout, array)
            continue
        wanted = description.descriptor(EXEC_ARG_MD, number)
        if number in problem.packed:
            copy, step = pack(number, array, layout, wanted)
            before.append(step)
        else:
            copy = memory(wanted.nbytes)
            ends = (wanted, layout, copy, array) if number == problem.result else (layout, wanted, array, copy)
            moved = reorder(problem.library, problem.label, *ends, memory).step
            (after if number == problem.result else before).append(moved)
        arguments[number] = (wanted, copy)
    scratchpad_bytes = description.scratchpad_bytes
    if scratchpad_bytes:
        arguments[SCRATCHPAD] = (description.descriptor(SCRATCHPAD_MD), memory(scratchpad_bytes))
    bound = description.create().bind(arguments, problem.label)
    steps = [step for step in (*before, bound.step, *after) if step is not nothing_to_do]
    return Assembled(steps, bound, frozenset(direct))
