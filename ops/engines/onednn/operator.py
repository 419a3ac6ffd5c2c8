"""What operators with engine ONEDNN share: the library, working memory, packed constants, and the way back.

A class names this one first and the class of the default engine second. It says in `prepare_primitive` how oneDNN
computes the operator; where oneDNN refuses, the default engine's `prepare` serves this preparation, in blocked orders
that of the same operator in NCHW (`plain_order`).
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import numpy as np

from dagexec.core.choices import choices, seconds_left
from dagexec.core.conversion import ConvertedStep
from dagexec.core.dtypes import BFLOAT16, FLOAT16, FLOAT32, TypeMeta, from_numpy
from dagexec.core.node import Node
from dagexec.core.operator import Operator, Prepared, Rebind, Repeat, Step, nothing_to_do
from dagexec.core.schema import OperatorCall, TensorType
from dagexec.errors import UnsupportedFeatureError
from dagexec.ops.base.layout import ORDERS, blocked_orders, logical_shape
from dagexec.ops.engines.onednn.accuracy import is_coarse
from dagexec.ops.engines.onednn.alike import repeat_of
from dagexec.ops.engines.onednn.binding import Library, known_library
from dagexec.ops.engines.onednn.bound import ArgumentRebind, BoundPrimitive, Rebindable
from dagexec.ops.engines.onednn.cutting import Parts, cut_primitive
from dagexec.ops.engines.onednn.descriptors import DST, SCRATCHPAD, SRC, Array, Attributes, Descriptor, aligned_empty
from dagexec.ops.engines.onednn.keeping_nan import is_seen, keeping_nan, scanning
from dagexec.ops.engines.onednn.nchw_fallback import in_plain_order
from dagexec.ops.engines.onednn.packing import Making, form_of, offer_unpacking, packed_form
from dagexec.ops.engines.onednn.post_ops import drops_nan
from dagexec.ops.engines.onednn.primitive import (
    SCRATCHPAD_MD,
    Primitive,
    PrimitiveDescriptor,
    describe,
    primitives_made,
)
from dagexec.ops.engines.onednn.recipe import (
    Packing,
    Recipe,
    Tensors,
    find_recipe,
    follow_recipe,
    keep_recipe,
    read_recipe,
    recipe_key,
    tensors_of,
)
from dagexec.ops.families.activation.post_ops import SUM, PostOp
from dagexec.ops.kernels.moving import TableRebind, table_rebind
from dagexec.ops.kernels.sharing import MOST_PIECES, SMALL_PART, pieces_of, work_seconds
from dagexec.platform.addresses import address_of
from dagexec.platform.extras import install_command

if TYPE_CHECKING:
    from dagexec.core.workspace import Workspace

logger = logging.getLogger("dagexec")

_latest: deque[Primitive] = deque(maxlen=64)
"""Reorders that have packed weights: the next layer may have weights of the same shape."""

_PRIMITIVE_BYTES = 64 << 10
"""What the library takes for a new primitive, most of it code; by about that resident memory grows in a small CNN."""

COMPUTED_TYPES = (FLOAT32, BFLOAT16, FLOAT16)

Arguments = Mapping[int, tuple[Descriptor, Array]]
"""By argument number, a descriptor and the array whose memory it describes."""


class _Answer(Exception):  # noqa: N818 - not an error
    """Whether there is a kernel: what `has_kernel` wanted to know."""

    def __init__(self, found: bool) -> None:
        super().__init__(found)
        self.found = found


class _Wanted(NamedTuple):
    """The key that a recipe is to be kept under, and the tensors that it is read off."""

    key: Hashable
    tensors: Tensors


class OneDNNOperator(Operator):
    """Base of operators that oneDNN computes.

    Attributes:
        onednn: the library.
        names_for_all: the implementation for all batches, by geometry.
        orders: of image tensors; all.
        metas: element types of input 0 that go to oneDNN; the default engine computes others.
        asks: nothing is prepared: it is asked whether there is a kernel (`has_kernel`).
        repeats: how it is prepared follows from its definition, and the layouts of its tensors, so that operators for
            which these are the same share a `Recipe`.
        moved_inputs: the most inputs, from the first on, that nothing but arguments of native calls leads to, so that
            the step can be pointed at a caller's arrays; and likewise all outputs. 0 where that is not so.
    """

    reads_strided: ClassVar[bool] = False
    writes_strided: ClassVar[bool] = False
    orders: ClassVar[tuple[str, ...]] = ORDERS
    metas: ClassVar[Collection[TypeMeta]] = COMPUTED_TYPES
    repeats: ClassVar[bool] = False
    moved_inputs: ClassVar[int] = 0
    asks = False  # during has_kernel

    def __init__(self, definition: Node, workspace: Workspace, *, index: int = -1, net: str = "") -> None:
        """Raises UnsupportedFeatureError where neither oneDNN nor our own kernels can compute."""
        super().__init__(definition, workspace, index=index, net=net)
        library = known_library()
        if library is None:
            raise UnsupportedFeatureError(
                f"{self.label}: oneDNN is not available; install it with: {install_command('onednn')}"
            )
        self.onednn: Library = library
        self.names_for_all: dict[str, str] = {}
        self._for_all: tuple[Array, ...] = ()  # during prepare
        self._packings: dict[int, Packing] = {}  # during prepare, by address
        self._is_unseen = False  # during prepare: compiled code, not generated; its comparisons may leave no trace
        self._keeps_nan = self.definition.values.once("keeps NaN", self._reads_nan)

    def _reads_nan(self) -> bool:
        return self.arguments.string("nan", "kept") != "any"

    def prepare(self) -> Step:
        """oneDNN's step, or the default engine's where oneDNN refuses and the default engine knows the order."""
        if all(self.y(index).size == 0 for index in range(len(self.output_blobs))):
            return nothing_to_do
        return self._movable(self._prepare())

    def _movable(self, step: Step) -> Step:
        """`step`, where a caller's arrays may take the place of inputs and outputs that native calls alone touch."""
        names = self.definition.input
        if not self.moved_inputs or not set(names).isdisjoint(self.definition.output):
            return step
        prepared = step if isinstance(step, Prepared) else Prepared(step)
        if prepared.input_rebinds or prepared.output_rebinds or prepared.inputs_in_place or prepared.outputs_in_place:
            return step
        fed = [index for index in range(min(self.moved_inputs, len(names))) if self.input(index).constant is None]
        inputs = {index: table_rebind(prepared.step, self.x(index)) for index in fed}
        outputs = {index: table_rebind(prepared.step, self.y(index)) for index in range(len(self.definition.output))}
        return replace(prepared, input_rebinds=_offered(inputs), output_rebinds=_offered(outputs))

    def _prepare(self) -> Step:
        followed = self._followed()
        self._packings = {}
        if isinstance(followed, Prepared):
            return followed
        if self.prefers_default():
            return super().prepare()  # type: ignore[safe-super]
        try:
            if self.input(0).meta not in self.metas:
                raise UnsupportedFeatureError(f"{self.label}: oneDNN does not compute it in {self.input(0).meta}")
            keeps_nan = self._keeps_nan and self.drops_nan()
            if keeps_nan and not self.sees_nan:
                raise UnsupportedFeatureError(f"{self.label}: oneDNN would turn NaN into a number")
            before = primitives_made()
            made = self.prepare_primitive()
            self.keeps((primitives_made() - before) * _PRIMITIVE_BYTES)
            prepared = made if isinstance(made, Prepared) else Prepared(made)  # primitives need no shared buffer
            return self._noted(prepared, followed, keeps_nan)
        except UnsupportedFeatureError as reason:
            if self.needs_onednn():
                return in_plain_order(self, reason)
            logger.info("%s: the default engine computes it: %s", self.label, str(reason))
            return super().prepare()  # type: ignore[safe-super]
        finally:
            self._is_unseen = False
            self._for_all = ()
            self._packings = {}

    def _noted(self, prepared: Prepared, wanted: _Wanted | None, keeps_nan: bool) -> Prepared:
        """`prepared`, with what keeps NaN if need be; how it was made is noted for others, if that is `wanted`."""
        recipe = None
        if wanted is not None:
            working = self.given_memory
            recipe = read_recipe(
                self, wanted.tensors, prepared, working, is_unseen=self._is_unseen, keeps_nan=keeps_nan
            )
            keep_recipe(wanted.key, recipe)
        whole = self.kept(prepared) if keeps_nan else prepared
        if recipe is None or wanted is None:
            return whole
        return replace(whole, keeps=recipe)

    def repeat(self, prepared: Prepared) -> Repeat | None:
        """By the recipe, where nothing but primitives on packed tensors is in it."""
        recipe = prepared.keeps
        if not isinstance(recipe, Recipe) or isinstance(prepared.step, ConvertedStep):
            return None
        return repeat_of(recipe, self, tensors_of(self))

    @property
    def circumstances(self) -> Hashable | None:
        """What was chosen; None while choices are measured, and where values count."""
        if not self.repeats or seconds_left() > 0:
            return None
        return frozenset(self.names_for_all.items()), choices.generation

    def _followed(self) -> Prepared | _Wanted | None:
        """It as another operator was prepared, if one was; else where others will look for how it was, or None.

        Its constants have to be packed already.
        """
        if not self.repeats or seconds_left() > 0:  # what is measured now may be chosen
            return None
        tensors = tensors_of(self)
        key = recipe_key(self, tensors)
        if key is None:
            return None
        recipe = find_recipe(key)
        prepared = None if recipe is None else follow_recipe(recipe, self, tensors)
        if recipe is None or prepared is None:
            return _Wanted(key, tensors)
        self._is_unseen = recipe.is_unseen
        self.names_for_all.update(recipe.names_for_all)
        try:
            return replace(self.kept(prepared), keeps=recipe) if recipe.keeps_nan else prepared
        finally:
            self._is_unseen = False

    @property
    def names(self) -> tuple[str, ...]:
        """Of the blobs that it reads, and then of those that it writes."""
        return (*self.definition.input, *self.definition.output)

    def for_all(self, array: Array) -> Array:
        """Say in `prepare_primitive` that every operator of its form could read this new array; it is given back."""
        array.flags.writeable = False
        self._for_all = (*self._for_all, array)
        return array

    def is_for_all(self, array: Array) -> bool:
        """True for what `for_all` was told of."""
        return any(array is one for one in self._for_all)

    def packed_by(self, packed: Array, packing: Packing) -> Array:
        """Say in `prepare_primitive` how other operators of its form pack this constant; the array is given back."""
        self._packings[address_of(packed)] = packing
        return packed

    def packing_at(self, address: int) -> Packing | None:
        """What `packed_by` was told of the array that begins there."""
        return self._packings.get(address)

    def kept(self, prepared: Prepared) -> Prepared:
        """`prepared` with what keeps NaN."""
        if self._is_unseen:
            return scanning(self, prepared, self.onednn.machine)
        return keeping_nan(self, prepared, self.onednn.machine)

    def drops_nan(self) -> bool:
        """True where oneDNN may give a number for NaN, so that `keeping_nan` has to stand behind the step."""
        return False

    @property
    def sees_nan(self) -> bool:
        """True where it can be seen that oneDNN has met a NaN, and the inputs are still there then."""
        in_place = not set(self.definition.input).isdisjoint(self.definition.output)
        return not in_place and is_seen(self.onednn)

    def split_post_ops(self, post_ops: Sequence[PostOp]) -> tuple[Sequence[PostOp], Sequence[PostOp]]:
        """Those of the primitive, and those behind it: from the first on that is coarse, or would drop NaN unseen."""
        loses_nan = self._keeps_nan and not self.sees_nan
        apart = (is_coarse(self.onednn, one) or (loses_nan and drops_nan([one])) for one in post_ops)
        first = next((place for place, is_apart in enumerate(apart) if is_apart), len(post_ops))
        if any(one.kind == SUM for one in post_ops[first:]):
            return post_ops, ()
        return post_ops[:first], post_ops[first:]

    def prefers_default(self) -> bool:
        """True where the default engine is known to be faster."""
        return False

    def needs_onednn(self) -> bool:
        """True when the default engine cannot compute what is requested: a blocked layout."""
        return bool(blocked_orders(self.arguments))

    def prepare_primitive(self) -> Step:
        """The step by oneDNN. Raises UnsupportedFeatureError where the default engine has to serve."""
        raise UnsupportedFeatureError(f"{self.label}: no primitive")

    def attributes(self) -> Attributes:
        """New attributes of a primitive."""
        return Attributes(self.onednn)

    def packed(self, array: Array) -> Descriptor:
        """The descriptor of an array as it is: its own shape and strides."""
        return Descriptor.of(self.onednn, array, from_numpy(array.dtype))

    def image(self, array: Array, order: str) -> Descriptor:
        """The logical (N, C, spatial) descriptor of an image tensor stored in `order`."""
        return Descriptor.of_order(self.onednn, logical_shape(order, array.shape), from_numpy(array.dtype), order)

    def describe(self, function: str, *arguments: object) -> PrimitiveDescriptor:
        """See `primitive.describe`: the first implementation."""
        return describe(self.onednn, self.label, function, *arguments)

    def describe_fast(self, function: str, *arguments: object) -> PrimitiveDescriptor:
        """As `describe`, but raises UnsupportedFeatureError for oneDNN's reference code.

        The reference is there to be right and not to be fast: a thousand times slower than others in places.
        """
        found = self.describe(function, *arguments)
        if found.is_reference:
            raise UnsupportedFeatureError(f"{self.label}: {function}: oneDNN has only its reference implementation")
        return found

    def has_kernel(self) -> bool:
        """True when the library has code for the operator as it is, in its order; nothing is made or measured."""
        if self.input(0).meta not in self.metas:
            return False
        self.asks = True
        try:
            self.prepare_primitive()
        except _Answer as answer:
            return answer.found
        except UnsupportedFeatureError:
            return False
        finally:
            self.asks = False
        return True

    def answer(self, found: Callable[[], bool]) -> None:
        """Ends a preparation that is for `has_kernel` alone with what `found` gives; nothing happens in others."""
        if self.asks:
            raise _Answer(found())

    def bound(self, description: PrimitiveDescriptor, arguments: Arguments) -> BoundPrimitive:
        """The primitive on `arguments`, and on working memory as it needs it."""
        self.answer(lambda: not description.is_reference)
        self._is_unseen = not description.is_generated
        nbytes = description.scratchpad_bytes
        if nbytes:
            scratchpad = (description.descriptor(SCRATCHPAD_MD), self.working_memory(nbytes))
            arguments = {**arguments, SCRATCHPAD: scratchpad}
        return description.create().bind(arguments, self.label)

    def in_parts(
        self, description: PrimitiveDescriptor, arguments: Arguments, axes: Sequence[int] = (0,), unit: int = 1
    ) -> BoundPrimitive | Parts:
        """As `bound`, in pieces where the work is worth it: along `axes` of the result; see `cut_primitive`."""
        cut = None if self.asks else cut_primitive(description, arguments, axes, unit, self.pieces, self.bound)
        return cut or self.bound(description, arguments)

    @property
    def pieces(self) -> int:
        """In how many pieces the work of the operator is cut."""
        return self.call().once(self._pieces_of)

    def _pieces_of(self, call: OperatorCall) -> int:
        outputs = [TensorType(tuple(self.y(i).shape), self.output(i).meta) for i in range(len(self.output_blobs))]
        seconds = work_seconds(self.schema.cost(call, outputs), self.onednn.isa.lanes)
        return pieces_of(seconds, MOST_PIECES, SMALL_PART)

    def rebindable(
        self, step: Step, bound: Rebindable, inputs: Mapping[int, int], outputs: Mapping[int, int]
    ) -> Prepared:
        """`step`, where a caller's memory may take the place of inputs and outputs: by index, their argument numbers.

        Each argument must be all that the step does with the array. In place nothing is offered.
        """
        if set(self.definition.input) & set(self.definition.output):
            return Prepared(step)
        return Prepared(
            step,
            {index: ArgumentRebind(bound, number) for index, number in inputs.items()},
            {index: ArgumentRebind(bound, number) for index, number in outputs.items()},
        )

    def reorder(self, source: Descriptor, target: Descriptor, x: Array, y: Array) -> BoundPrimitive:
        """The primitive that copies `x` to `y`, from layout and type `source` to `target`."""
        return reorder(self.onednn, self.label, source, target, x, y, self.working_memory)

    def parameter(self, index: int, array: Array, source: Descriptor, target: Descriptor) -> tuple[Array, Step]:
        """Input `index`, seen as `array` of layout `source`, in layout `target`, and the step that makes it so.

        Of a constant input it is made once, for all operators that ask, and there is nothing to do in a run.
        """
        if source == target:
            return array, nothing_to_do
        constant = self.input(index).constant
        if constant is None:
            packed = self.working_memory(target.nbytes)
            return packed, self.reorder(source, target, array, packed).step
        start = address_of(array) - address_of(self.x(index))
        packed = packed_form(constant, form_of(source, target, start), self.reordered(source, target, array))
        self.packed_by(packed, partial(_packed_view, index, (array.shape, start, array.strides), source, target))
        if constant.may_go(array.nbytes) and source.nbytes == array.nbytes:
            self._offer_reordering(index, array, target, source, packed)
        return packed, nothing_to_do

    def _offer_reordering(
        self, index: int, array: Array, source: Descriptor, target: Descriptor, packed: Array
    ) -> None:
        """Let input `index` be made anew from what is `packed` in layout `source`, if the library can copy it back.

        Layouts of blocks of one type hold every number; whether others do is tried.
        """
        library, label = self.onednn, self.label

        def unpack(plain: Array) -> None:
            reorder(library, label, source, target, packed, plain, aligned_empty).run_once()

        try:
            copy_between(library, label, source, target)
        except UnsupportedFeatureError:
            return
        ends = source.form, target.form
        surely = all(isinstance(one, str) for one in ends) and len({str(one).split()[0] for one in ends}) == 1
        offer_unpacking(self.input(index), array, unpack, label, surely=surely)

    def reordered(self, source: Descriptor, target: Descriptor, array: Array) -> Making:
        """`array`, of layout `source`, in layout `target`."""

        def fill(packed: Array) -> None:
            bound = reorder(self.onednn, self.label, source, target, array, packed, aligned_empty)
            bound.run_once()
            _latest.append(bound.primitive)

        return Making("copy", target.nbytes, fill)


def reorder(
    library: Library,
    label: str,
    source: Descriptor,
    target: Descriptor,
    x: Array,
    y: Array,
    memory: Callable[[int], Array],
) -> BoundPrimitive:
    """The primitive that copies `x`, of layout and type `source`, to `y`, of `target`; `memory` gives scratchpads.

    Raises UnsupportedFeatureError when oneDNN has no such copy.
    """
    found = copy_between(library, label, source, target)
    arguments = {SRC: (source, x), DST: (target, y)}
    if found.scratchpad_bytes:
        arguments[SCRATCHPAD] = (found.descriptor(SCRATCHPAD_MD), memory(found.scratchpad_bytes))
    return found.create().bind(arguments, label)


def copy_between(library: Library, label: str, source: Descriptor, target: Descriptor) -> PrimitiveDescriptor:
    """What copies `source` to `target`. Raises UnsupportedFeatureError when oneDNN has no such copy."""
    return describe(library, label, "reorder", source, library.engine, target, library.engine, Attributes(library))


def _packed_view(
    index: int,
    view: tuple[tuple[int, ...], int, tuple[int, ...]],
    source: Descriptor,
    target: Descriptor,
    operator: OneDNNOperator,
) -> Array:
    """Input `index` of an operator, seen with a shape, from a byte on, with strides, in layout `target`."""
    x, (shape, start, strides) = operator.x(index), view
    seen = np.ndarray(shape, x.dtype, x.reshape(-1).view(np.uint8), start, strides)
    return operator.parameter(index, seen, source, target)[0]


def _offered(rebinds: Mapping[int, TableRebind | None]) -> dict[int, Rebind]:
    return {index: rebind for index, rebind in rebinds.items() if rebind is not None}
