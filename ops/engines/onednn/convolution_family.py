"""What all convolutions by oneDNN share: the problem put to the library, and the steps of what is chosen for it.

Weights that never change are packed once and shared by all operators that read them; others are copied into the layout
of the implementation in every run.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from dagexec.core.choices import seconds_left
from dagexec.core.dtypes import FLOAT16, FLOAT32
from dagexec.core.operator import Prepared, Step, in_sequence, nothing_to_do
from dagexec.errors import UnsupportedFeatureError
from dagexec.ops.base.geometry import tap_count
from dagexec.ops.base.layout import BLOCKS, NCHW, NHWC, logical_shape
from dagexec.ops.engines.onednn import widened
from dagexec.ops.engines.onednn.convolution_computation import (
    Computation,
    all_of,
    is_for_winograd,
    is_ragged,
    key_of_choice,
    padding_of,
    tail_of,
)
from dagexec.ops.engines.onednn.descriptors import (
    BIAS,
    WEIGHTS,
    Array,
    Descriptor,
    aligned_empty,
)
from dagexec.ops.engines.onednn.implementation import choose_implementation, shared_seconds
from dagexec.ops.engines.onednn.operator import OneDNNOperator
from dagexec.ops.engines.onednn.packing import Making, form_of, offer_unpacking, packed_form
from dagexec.ops.engines.onednn.pieces import (
    MOST_OF_BATCH,
    ONE,
    Part,
    computed_in_pieces,
    parts_of_batch,
    parts_of_filters,
    parts_of_image,
)
from dagexec.ops.engines.onednn.primitive import PrimitiveDescriptor, describe
from dagexec.ops.engines.onednn.problem import DIRECT, Assembled, Candidate, Problem, assemble
from dagexec.ops.engines.onednn.recipe import recipe_key, tensors_of
from dagexec.ops.kernels.chains import chain_step
from dagexec.ops.kernels.sharing import pieces_of
from dagexec.ops.kernels.tables import shares
from dagexec.platform.addresses import address_of
from dagexec.platform.records import dataclass

SCRATCHPAD_LIMIT = 512 << 20
"""Default of `ws_nbytes_limit`, bytes. F(4x4, 3x3) takes up to 2.3 times its images' bytes: 228 MiB for 8 images of
128 x 112 x 112. The memory plan lets operators share it."""

ComputationOf = Callable[[Part], Computation]
"""Gives the computation of a part of a convolution."""

ArraysOf = Callable[[Part], Mapping[int, Array]]
"""Gives the arrays of that computation."""

_WHOLE = Part()


@dataclass(frozen=True)
class _Way:
    """How convolutions of one form are computed whose tensors have the same layouts: layers of a net repeat.

    Attributes:
        parts: of the result, with the place of the problem that each is, and what computes it.
        problems: these problems.
        pieces: how many the parts are computed in; 0 where a single one is computed as it is.
        inputs: the input number of each argument that is an input.
        names: `names_for_all` of the operator once it was prepared.
    """

    parts: tuple[tuple[Part, int, Candidate], ...]
    problems: tuple[Problem, ...]
    pieces: int
    inputs: Mapping[int, int]
    names: Mapping[str, str]


_ways: weakref.WeakValueDictionary[Hashable, _Way] = weakref.WeakValueDictionary()
"""As long as one of the operators lives that were prepared so last."""


SumsOf = Callable[[Part, Mapping[int, Array]], Computation]
"""Gives the computation of sums over a part of a batch into arrays, by argument number."""


class ConvolutionFamily(OneDNNOperator):
    """What all convolutions by oneDNN share: the choice of an implementation and the steps around it."""

    _followed_way: _Way | None = None  # by which it was prepared last, and which it keeps for others

    @property
    def keeps_nan_itself(self) -> bool:
        """True where all that was prepared last keeps it."""
        way = self._followed_way
        return way is not None and all(by.keeps_nan for _, _, by in way.parts)

    def kept(self, prepared: Prepared) -> Prepared:
        """As in the base; kernels that keep NaN are as they are."""
        return prepared if self.keeps_nan_itself else super().kept(prepared)

    def require_wide_sums(self) -> None:
        """Raise UnsupportedFeatureError when float16 is to be rounded at every operation, which oneDNN does not do."""
        if self.arguments.bool("float16_compute") and self.input(0).meta is FLOAT16:
            raise UnsupportedFeatureError(f"{self.label}: float16_compute requires sums rounded to float16")

    def is_constant(self, index: int) -> bool:
        """True when input `index` never changes."""
        return self.input(index).constant is not None

    @property
    def scratchpad_limit(self) -> int:
        """The most bytes of working memory that an implementation may take."""
        return self.arguments.int("ws_nbytes_limit", SCRATCHPAD_LIMIT)

    @property
    def weights_are_cold(self) -> bool:
        """False when the weights of the net stay in a cache from one run to the next: argument `cold_weights`=0."""
        return self.arguments.bool("cold_weights", True)

    def implementation(self, problem: Problem) -> Candidate:
        """The implementation that computes `problem`, as `exhaustive_search` and `deterministic` have it chosen."""
        search = self.arguments.bool("exhaustive_search")
        return choose_implementation(
            problem,
            search=search and not self.arguments.bool("deterministic"),
            given_only=self.arguments.bool("deterministic"),
        )

    def parameter(self, index: int, array: Array, source: Descriptor, target: Descriptor) -> tuple[Array, Step]:
        """As in the base; a layout that the library cannot reach from `source` is reached from a packed copy."""
        try:
            return super().parameter(index, array, source, target)
        except UnsupportedFeatureError:
            pass
        constant = self.input(index).constant
        memory = self.working_memory if constant is None else aligned_empty
        plain = memory(array.nbytes).view(array.dtype).reshape(array.shape)
        copied = partial(np.copyto, plain, array)
        if constant is None:
            packed, step = super().parameter(index, plain, self.packed(plain), target)
            return packed, in_sequence([copied, step])
        copied()
        form = form_of(source, target, address_of(array) - address_of(self.x(index)))
        return packed_form(constant, form, self.reordered(self.packed(plain), target, plain)), nothing_to_do

    def convolution(self, computation: ComputationOf, arrays_of: ArraysOf | None = None) -> Assembled:
        """The steps that compute the whole.

        The bytes of an image do not depend on other images: it is computed by what gives the same in any batch, or in
        pieces of its own. Of an operator that is not batch-invariant, parts of the batch are computed. What is found
        out for the first operator of a form is so for others, whose arrays `arrays_of` gives.
        """
        self._followed_way = None
        repeats = arrays_of is not None and not self.asks and seconds_left() == 0
        key = recipe_key(self, tensors_of(self)) if repeats else None
        way = None if key is None else _ways.get(key)
        if way is None:
            whole = computation(Part())
            problem = self.asked_of_library(whole)
            self.answer(lambda: any(not one.is_reference for one in problem.candidates()))
            parts = [] if self.is_batch_invariant else parts_of_batch(whole.batch, problem.weights_nbytes)
            if len(parts) > 1:
                return self.batch_in_parts([computation(part) for part in parts], whole)
            way = self._way(problem, computation, whole)
            if key is not None:
                _ways[key] = way
        self._followed_way = way
        self.names_for_all.update(way.names)
        return self._by(way, arrays_of or (lambda part: computation(part).arrays))

    def _by(self, way: _Way, arrays_of: ArraysOf) -> Assembled:
        """The steps that compute the whole."""
        pack, whole = partial(self._packed, way.inputs), arrays_of(Part())
        problems = [one.answered(self.label) for one in way.problems]
        pieces = [(problems[place], by, whole if part is _WHOLE else arrays_of(part)) for part, place, by in way.parts]
        if way.pieces:
            found = computed_in_pieces(self.label, pieces, way.pieces, self.working_memory, pack, whole)
        else:
            [(problem, by, arrays)] = pieces
            found = assemble(problem, by, arrays, self.working_memory, pack)
        self.keeps(found.nbytes)
        return found

    def _way(self, problem: Problem, computation: ComputationOf, whole: Computation) -> _Way:
        """How the `whole`, which is `problem`, is computed."""
        alone = problem if whole.batch == 1 else self.asked_of_library(computation(Part(ONE)))
        chosen = self._chosen_for_all(alone)
        names = {alone.geometry: chosen.name}
        if chosen.is_in_pieces:
            found = chosen if whole.batch == 1 else problem.named(chosen.name)
            if found is not None:
                return _Way(((_WHOLE, 0, found),), (problem.answered(""),), 0, whole.inputs, names)
        parts, pieces = self._in_pieces(chosen, alone, computation, whole)
        problems = {id(one): one for _, one, _ in parts}
        places = {number: place for place, number in enumerate(problems)}
        answered = tuple(one.answered("") for one in problems.values())
        return _Way(
            tuple((part, places[id(one)], by) for part, one, by in parts), answered, pieces, whole.inputs, names
        )

    def _chosen_for_all(self, alone: Problem) -> Candidate:
        """What computes one image: that which has computed images of this geometry before."""
        name = self.names_for_all.get(alone.geometry)
        return (alone.named(name) if name else None) or self.implementation(alone)

    def _in_pieces(
        self, chosen: Candidate, alone: Problem, computation: ComputationOf, whole: Computation
    ) -> tuple[list[tuple[Part, Problem, Candidate]], int]:
        """The parts that are computed, by the implementation `chosen` for one image, `alone`, and the pieces of all."""
        known: dict[Hashable, tuple[Problem, Candidate | None]] = {}

        def computed_by(parts: Sequence[Part]) -> list[tuple[Part, Problem, Candidate]]:
            """What computes the parts; nothing where one of them is not computed so."""
            found: list[tuple[Part, Problem, Candidate]] = []
            for part in parts:
                asked = computation(part)
                if asked.geometry not in known:
                    problem = self.asked_of_library(asked)
                    known[asked.geometry] = problem, problem.named(chosen.name)
                problem, one = known[asked.geometry]
                if one is None:
                    return []
                found.append((part, problem, one))
            return found

        cut, seconds = [Part(ONE)], shared_seconds(alone, chosen)
        if whole.rows:
            cut = parts_of_image(whole.axes, seconds, alone.weights_nbytes)
        elif whole.block:
            cut = parts_of_filters(len(whole.parameters[WEIGHTS]), whole.block, seconds, chosen.most_pieces)
        of_image = computed_by(cut) if len(cut) > 1 else []
        cut = cut if of_image else [Part(ONE)]
        pieces = pieces_of(whole.batch * seconds, MOST_OF_BATCH)
        found = of_image if whole.batch == 1 else []
        if len(cut) == whole.batch == 1:
            found = [(_WHOLE, alone, chosen)]
        elif len(cut) == 1 and chosen.is_divisible:
            found = computed_by([Part((share.start, share.stop)) for share in shares(whole.batch, pieces)])
        if not found:
            images = [(image, image + 1) for image in range(whole.batch)]
            found = computed_by([replace(part, images=one) for one in images for part in cut])
        return found, pieces

    def filter_sums(self, computation: SumsOf, batch: int, results: Mapping[int, Array]) -> list[Step]:
        """The steps that compute `results`, sums over a batch of images, by argument number.

        Each piece sums up some images, and these sums are added in order.
        """
        wide = all(array.itemsize >= FLOAT32.itemsize for array in results.values())
        parts = parts_of_batch(batch, sum(array.nbytes for array in results.values())) if wide else [Part((0, batch))]
        sums = [results, *({number: self._like(array) for number, array in results.items()} for _ in parts[1:])]
        steps = self.batch_in_parts([computation(part, into) for part, into in zip(parts, sums, strict=True)]).steps
        others = [[one[number] for one in sums[1:]] for number in results]
        return [*steps, *(self._added(array, beside) for array, beside in zip(results.values(), others, strict=True))]

    def _added(self, total: Array, others: Sequence[Array]) -> Step:
        """The step that adds the others to `total`, in order."""
        links = [("add", 0.0, 0.0, place) for place in range(len(others))]
        step = chain_step(self.onednn.machine, links, total, total, others, self.label) if links else nothing_to_do
        return step or in_sequence([partial(np.add, total, array, out=total) for array in others])

    def batch_in_parts(self, asked: Sequence[Computation], whole: Computation | None = None) -> Assembled:
        """The steps of computations of parts of a batch, each by what is chosen for so many images.

        With the `whole` its arguments can be moved.
        """
        problems = {one.batch: self.asked_of_library(one) for one in asked}
        self.answer(lambda: any(not one.is_reference for one in problems[asked[0].batch].candidates()))
        chosen = {batch: self.implementation(problem) for batch, problem in problems.items()}
        assembled = computed_in_pieces(
            self.label,
            [(problems[one.batch], chosen[one.batch], one.arrays) for one in asked],
            len(asked),
            self.working_memory,
            partial(self._packed, asked[0].inputs),
            None if whole is None else whole.arrays,
        )
        self.keeps(assembled.nbytes)
        return assembled

    def _like(self, array: Array) -> Array:
        """Working memory for as much, in the same shape."""
        found: Array = self.working_memory(array.nbytes).view(array.dtype).reshape(array.shape)
        return found

    def _packed(
        self,
        inputs: Mapping[int, int],
        number: int,
        array: Array,
        source: Descriptor,
        target: Descriptor,
        making: Making | None = None,
    ) -> tuple[Array, Step]:
        """A parameter in another layout; see `problem.Pack`."""
        tensor = self.input(inputs[number])
        if making is None or tensor.constant is None:
            return self.parameter(inputs[number], array, source, target)
        packed = packed_form(tensor.constant, form_of(source, target), making)
        if making.unpack is not None:
            offer_unpacking(tensor, array, partial(making.unpack, packed), self.label)
        return packed, nothing_to_do

    def asked_of_library(self, asked: Computation) -> Problem:
        """The problem that is put to the library."""
        library, axes, weights, meta = self.onednn, asked.axes, asked.weights, asked.meta
        tensors = {number: self.image(*image) for number, image in asked.images.items()}
        tensors |= {number: self.packed(array) for number, array in asked.parameters.items()}
        tensors |= {number: descriptor for number, (descriptor, _) in asked.operands.items()}
        constant = frozenset(number for number, index in asked.inputs.items() if self.is_constant(index))
        composed, padding = asked.composed, padding_of(asked.function, axes[-1])
        if asked.groups > 1 and meta is FLOAT32 and WEIGHTS in constant and widened.pays(weights.shape):
            ask_wide = partial(self._ask_wide, asked, tensors)
            composed = all_of(composed, partial(widened.candidates, ask_wide, weights.shape, padding))
        layouts = tuple((number, descriptor.key) for number, descriptor in tensors.items())
        window = ";".join(f"{axis.kernel},{axis.stride},{axis.dilation},{axis.head},{tail_of(axis)}" for axis in axes)
        key = None if asked.attributes is None else (asked.attributes, layouts, window, asked.filters in constant)
        wanted = {**tensors, asked.filters: Descriptor.any_layout(library, weights.shape, meta)}
        return Problem(
            library=library,
            label=self.label,
            key=key_of_choice(asked, window, constant),
            ask=partial(self._ask, asked, wanted, key),
            tensors={number: (descriptor, meta) for number, descriptor in tensors.items()},
            result=asked.result,
            plain={asked.filters: Descriptor.of_order(library, weights.shape, meta, NCHW)},
            packed=frozenset({WEIGHTS, BIAS}),
            constant=constant,
            taps=tap_count(axes),
            fan_in=weights[0].size if weights.ndim == len(axes) + 2 else weights[0, 0].size,
            algorithms=asked.algorithms if is_for_winograd(axes, weights) else (DIRECT,),
            own_layouts=asked.own_layouts and asked.orders.isdisjoint(BLOCKS),
            limit=self.scratchpad_limit,
            cold=self.weights_are_cold,
            batch=asked.batch,
            places=tuple(axis.out for axis in axes),
            ragged=is_ragged(weights, len(axes), library.isa.lanes),
            groups=asked.groups,
            composed=composed,
            padding=padding,
            blocks=len(weights) // asked.block if asked.block else 0,
        )

    def _ask(
        self, asked: Computation, layouts: Mapping[int, Descriptor], key: Hashable, algorithm: str, own: bool
    ) -> PrimitiveDescriptor:
        """Ask the library for a primitive, with `own` for one that chooses the layouts of images, too."""
        if own and algorithm == DIRECT and NHWC in asked.orders:
            raise UnsupportedFeatureError(f"{self.label}: direct implementations read NHWC directly")
        free = {
            number: Descriptor.any_layout(self.onednn, logical_shape(order, array.shape), asked.meta)
            for number, (array, order) in (asked.images.items() if own else ())
        }
        arguments = asked.request(algorithm, {**layouts, **free})
        whole = None if key is None else (algorithm, own, key)
        return describe(self.onednn, self.label, asked.function, self.onednn.engine, *arguments, key=whole)

    def _ask_wide(
        self, asked: Computation, layouts: Mapping[int, Descriptor], shape: tuple[int, ...]
    ) -> PrimitiveDescriptor:
        """Ask the library for a primitive with a filter of this shape, without groups."""
        filters = Descriptor.any_layout(self.onednn, shape, asked.meta)
        arguments = asked.request(DIRECT, {**layouts, asked.filters: filters})
        return describe(self.onednn, self.label, asked.function, self.onednn.engine, *arguments)

    def offered(
        self, step: Step, assembled: Assembled, inputs: Mapping[int, int], outputs: Mapping[int, int]
    ) -> Prepared:
        """As `rebindable`, for the tensors that the primitive itself reads or writes, and nothing else does.

        `inputs` and `outputs` give the number of each by argument number.
        """
        names = list(self.definition.input)
        direct = assembled.direct
        return self.rebindable(
            step,
            assembled.bound,
            {
                index: number
                for number, index in inputs.items()
                if number in direct and names.count(names[index]) == 1 and not self.is_constant(index)
            },
            {index: number for number, index in outputs.items() if number in direct},
        )
