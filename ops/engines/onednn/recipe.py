"""Recipes: how oneDNN computes an operator, for others that differ from it in nothing but where their tensors are.

Layers of a net repeat. To find out how the library computes one takes several times as long as to have the primitives
that were found work on other memory. A recipe is read off the steps that an operator was prepared as, and lives as
long as a preparation that was made by it; the latest live on, as sizes come back in loops whose values grow.

Only an operator whose steps follow from its definition and the layouts of its tensors may have one (`repeats`): not one
that looks at values, nor one that keeps memory of its own.
"""

from __future__ import annotations

import operator as operators
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from dagexec.core.choices import choices
from dagexec.core.native import Remake, remade
from dagexec.core.operator import Prepared, Rebind, Step, in_sequence, parts_of
from dagexec.core.tensor import Tensor
from dagexec.ops.engines.onednn.bound import ArgumentRebind, BoundPrimitive, Memory, bound_primitive_of, memory_at
from dagexec.ops.engines.onednn.cutting import Parts
from dagexec.ops.engines.onednn.descriptors import Array, Descriptor
from dagexec.ops.engines.onednn.primitive import Primitive
from dagexec.platform.addresses import address_of
from dagexec.platform.records import dataclass

if TYPE_CHECKING:
    from dagexec.ops.engines.onednn.operator import OneDNNOperator


Packing = Callable[["OneDNNOperator"], Array]
"""Packs a constant of an operator, for one that has not been packed so."""


@dataclass(frozen=True, slots=True)
class _Packed:
    """Constant input `index` in a packed form of so many bytes; `pack` makes it, None where that is not known."""

    index: int
    form: Hashable
    nbytes: int
    pack: Packing | None

    def of(self, operator: OneDNNOperator) -> Array | None:
        """That of an operator; None where it has to be packed first, and cannot be here."""
        constant = operator.input(self.index).constant
        assert constant is not None
        found = constant.find(self.form, self.nbytes)
        return found if found is not None or self.pack is None else self.pack(operator)


_Place = int | _Packed | Memory
"""Where an argument is: the number of an array among inputs, outputs and working memory, or a packed constant; or what
all operators of the form read."""


@dataclass(frozen=True, slots=True)
class Call:
    """A primitive; numbers of its arguments, and their descriptors and places; what may move: by index, a number."""

    primitive: Primitive
    numbers: tuple[int, ...]
    arguments: tuple[tuple[Descriptor, _Place], ...]
    inputs: tuple[tuple[int, int], ...]
    outputs: tuple[tuple[int, int], ...]

    @property
    def has_packed(self) -> bool:
        """Some argument is a packed constant."""
        return any(isinstance(place, _Packed) for _, place in self.arguments)


@dataclass(frozen=True, slots=True)
class _Remaking:
    """A step that is made anew: what makes it, the places of the arrays that it is made for, and what may move."""

    make: Remake
    places: tuple[int | _Packed, ...]
    inputs: tuple[tuple[int, int], ...]
    outputs: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Recipe:
    """Calls of primitives, and other steps, in order.

    Attributes:
        working: bytes of each piece of working memory.
        is_unseen: of the operator while it is prepared.
        keeps_nan: what keeps NaN stands behind the calls.
        names_for_all: those of the operator once it was prepared; who follows goes on with them, so that its bytes stay
            the same in every batch.
    """

    calls: tuple[Call | _Remaking, ...]
    working: tuple[int, ...]
    is_unseen: bool
    keeps_nan: bool
    names_for_all: Mapping[str, str]

    def places(self) -> Iterator[_Place]:
        """Where the arguments of the steps are."""
        for call in self.calls:
            yield from call.places if isinstance(call, _Remaking) else [place for _, place in call.arguments]


_recipes: weakref.WeakValueDictionary[Hashable, Recipe] = weakref.WeakValueDictionary()

_latest: deque[Recipe] = deque(maxlen=512)
"""They live on. Most have one primitive, of up to 64 KiB: together some 32 MiB."""


@dataclass(frozen=True, slots=True)
class Tensors:
    """The arrays of an operator's inputs and outputs, where they begin, and which of them are constants.

    Attributes:
        absent: the inputs whose plain values are not in memory. Their arrays have strides of 0 and no memory.
    """

    arrays: tuple[Array, ...]
    addresses: tuple[int, ...]
    constant: tuple[bool, ...]
    absent: frozenset[int] = frozenset()

    @property
    def layouts(self) -> tuple[tuple[object, ...], ...]:
        """Shape, strides and dtype of each."""
        return tuple(
            (array.shape, _packed_strides(array) if number in self.absent else array.strides, array.dtype)
            for number, array in enumerate(self.arrays)
        )


def tensors_of(operator: OneDNNOperator, *, present: bool = False) -> Tensors:
    """Those of `operator`, which is being prepared. Constants that are elsewhere packed come back if `present`."""
    inputs, outputs = range(len(operator.input_blobs)), range(len(operator.output_blobs))
    tensors = [*map(operator.input, inputs), *map(operator.output, outputs)]
    constant = tuple([tensor.constant is not None for tensor in tensors[: len(inputs)]])
    absent = () if present else [number for number, one in enumerate(tensors) if one.is_elsewhere]
    if absent and all(tensor.is_packed for tensor in tensors):
        return _with_absent(operator, tensors, constant, frozenset(absent))
    if all(tensor.is_packed for tensor in tensors):
        view = operator.runtime.host_view
        arrays = tuple([view(tensor.array) for tensor in tensors])
        return Tensors(arrays, tuple([tensor.address for tensor in tensors]), constant)
    arrays = (*map(operator.x, inputs), *map(operator.y, outputs))
    return Tensors(arrays, tuple(map(address_of, arrays)), constant)


def _with_absent(
    operator: OneDNNOperator, tensors: Sequence[Tensor], constant: tuple[bool, ...], absent: frozenset[int]
) -> Tensors:
    """As `tensors_of`; what is absent lies where nothing else does."""
    view = operator.runtime.host_view
    arrays = tuple(
        np.broadcast_to(np.zeros((), one.meta.numpy), one.shape) if number in absent else view(one.array)
        for number, one in enumerate(tensors)
    )
    addresses = tuple(-(number + 1) << 44 if number in absent else one.address for number, one in enumerate(tensors))
    return Tensors(arrays, addresses, constant, absent)


def _packed_strides(array: Array) -> tuple[int, ...]:
    """The strides, in bytes, of a packed array of its shape."""
    steps = accumulate(reversed(array.shape[1:]), operators.mul, initial=array.itemsize)
    return tuple(steps)[::-1] if array.ndim else ()


def recipe_key(operator: OneDNNOperator, tensors: Tensors) -> Hashable | None:
    """All that decides how `operator` is prepared; None where tensors overlap."""
    if _overlap(operator, tensors):
        return None
    layouts = tensors.layouts
    names = frozenset(operator.names_for_all.items())
    who = operator.onednn.has_primitives
    return operator.common_form, layouts, tensors.constant, names, choices.generation, who


def find_recipe(key: Hashable) -> Recipe | None:
    """The recipe for `key`, if something was prepared so and still is, or was lately."""
    return _recipes.get(key)


def keep_recipe(key: Hashable, recipe: Recipe | None) -> None:
    """Let others find `recipe`, as long as somebody has it or it is among the latest."""
    if recipe is not None:
        _recipes[key] = recipe
        _latest.append(recipe)


def read_recipe(
    operator: OneDNNOperator,
    tensors: Tensors,
    prepared: Prepared,
    working: Sequence[Array],
    *,
    is_unseen: bool,
    keeps_nan: bool,
) -> Recipe | None:
    """How `operator`, with these tensors, was prepared; None where that is more than steps that are known.

    `working` is the working memory that it was given.
    """
    places: dict[int, _Place] = {}
    for number, address in enumerate((*tensors.addresses, *map(address_of, working))):
        places.setdefault(address, number)
    for index in range(len(operator.input_blobs)):
        constant = operator.input(index).constant
        if constant is not None:
            for form, array in constant.forms().items():
                address = address_of(array)
                places.setdefault(address, _Packed(index, form, array.nbytes, operator.packing_at(address)))
    sizes = [array.nbytes for array in (*tensors.arrays, *working)]
    calls: list[Call | _Remaking] = []
    for step in parts_of(prepared.step):
        bound = bound_primitive_of(step)
        moved = [_moved(found, step) for found in (prepared.input_rebinds, prepared.output_rebinds)]
        if bound is None:
            remaking = _read_remaking(step, places, sizes, *moved)
            if remaking is None:
                return None
            calls.append(remaking)
            continue
        arguments = []
        for memory in bound.memories.values():
            place = memory if operator.is_for_all(memory.array) else places.get(address_of(memory.array))
            if place is None:
                return None
            arguments.append((memory.descriptor, place))
        calls.append(Call(bound.primitive, tuple(bound.memories), tuple(arguments), moved[0], moved[1]))
    offered = len(prepared.input_rebinds) + len(prepared.output_rebinds)
    if offered != sum(len(call.inputs) + len(call.outputs) for call in calls):
        return None
    return Recipe(tuple(calls), tuple(sizes[len(tensors.arrays) :]), is_unseen, keeps_nan, dict(operator.names_for_all))


def _read_remaking(
    step: Step,
    places: Mapping[int, _Place],
    sizes: Sequence[int],
    inputs: tuple[tuple[int, int], ...],
    outputs: tuple[tuple[int, int], ...],
) -> _Remaking | None:
    """How `step` is made anew; None where it cannot be, or is for other arrays than whole tensors and working memory.

    These take `sizes` bytes. `inputs` and `outputs` are what may move.
    """
    known = remade(step)
    if known is None:
        return None
    make, arrays = known
    found: list[int | _Packed] = []
    for array in arrays:
        place = places.get(address_of(array))
        if isinstance(place, int):
            nbytes = sizes[place]
        elif isinstance(place, _Packed):
            nbytes = place.nbytes
        else:
            return None
        if nbytes != array.nbytes:
            return None
        found.append(place)
    return _Remaking(make, tuple(found), inputs, outputs)


def follow_recipe(recipe: Recipe, operator: OneDNNOperator, tensors: Tensors) -> Prepared | None:
    """`operator` prepared as the recipe says; None where constants have to be packed first."""
    packed: dict[int, Array] = {}
    for place in recipe.places():
        if isinstance(place, _Packed):
            array = place.of(operator)
            if array is None:
                return None
            packed[id(place)] = array
    if tensors.absent and not tensors.absent.isdisjoint([place for place in recipe.places() if isinstance(place, int)]):
        tensors = tensors_of(operator, present=True)
    working = [operator.working_memory(nbytes) for nbytes in recipe.working]
    arrays = (*tensors.arrays, *working)
    addresses = (*tensors.addresses, *map(address_of, working))
    library, label = operator.onednn, operator.label
    steps: list[Step] = []
    inputs: dict[int, Rebind] = {}
    outputs: dict[int, Rebind] = {}
    for call in recipe.calls:
        if isinstance(call, _Remaking):
            given = [arrays[place] if type(place) is int else packed[id(place)] for place in call.places]
            made = call.make(*given, label)
            steps.append(made.step if isinstance(made, Parts) else made)
            inputs.update({index: ArgumentRebind(made, number) for index, number in call.inputs})
            outputs.update({index: ArgumentRebind(made, number) for index, number in call.outputs})
            continue
        memories: list[Any] = [
            memory_at(library, descriptor, arrays[place], addresses[place], label)
            if type(place) is int
            else memory_at(library, descriptor, packed[id(place)], address_of(packed[id(place)]), label)
            if type(place) is _Packed
            else place
            for descriptor, place in call.arguments
        ]
        bound = BoundPrimitive(call.primitive, call.numbers, memories, label)
        steps.append(bound)
        inputs.update({index: ArgumentRebind(bound, number) for index, number in call.inputs})
        outputs.update({index: ArgumentRebind(bound, number) for index, number in call.outputs})
    return Prepared(in_sequence(steps), inputs, outputs, keeps=recipe)


def _moved(rebinds: Mapping[int, Rebind], step: object) -> tuple[tuple[int, int], ...]:
    """The rebinds of the primitive that `step` executes: by index, the number of its argument."""
    return tuple(
        (index, rebind.number)
        for index, rebind in rebinds.items()
        if isinstance(rebind, ArgumentRebind) and getattr(rebind.bound, "step", None) is step
    )


def _overlap(operator: OneDNNOperator, tensors: Tensors) -> bool:
    """True when tensors of different names share memory; that names agree is part of the key."""
    ends = [start + array.nbytes for start, array in zip(tensors.addresses, tensors.arrays, strict=True)]
    taken = sorted(dict(zip(operator.names, zip(tensors.addresses, ends, strict=True), strict=True)).values())
    return any(end > after for (_, end), (after, _) in pairwise(taken))
