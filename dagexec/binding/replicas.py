"""Replicas: nets over shared parameters. Each has activations of its own, so each may be in the middle of a run.

The parameters live in one workspace; a replica's workspace is its child, and holds what the net writes or is fed with.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakSet

import numpy as np
import numpy.typing as npt

from dagexec.binding.block_sizes import BlockSizes
from dagexec.binding.io_binding import Array, IOBinding, Outputs, Signature, arrays_like, deliver, shown
from dagexec.binding.kept import Kept
from dagexec.binding.parameters import parameter_workspace, uses_shared_buffer
from dagexec.binding.placement import placed_net
from dagexec.core.dtypes import from_numpy
from dagexec.core.graph import Graph, build_graph
from dagexec.core.model import Model
from dagexec.core.program import Program
from dagexec.core.shared_buffer import create_shared_buffer
from dagexec.core.tensor import Tensor
from dagexec.core.variant import Variant
from dagexec.core.workspace import Workspace
from dagexec.errors import ResourceError
from dagexec.platform.arithmetic import arithmetic_context
from dagexec.platform.garbage_collection import garbage_collection_paused
from dagexec.platform.lazy import LazyModule
from dagexec.platform.records import dataclass
from dagexec.scheduler.nets.async_dag import AsyncDAGNet
from dagexec.scheduler.nets.dag import DAGNet
from dagexec.scheduler.nets.net import BaseNet
from dagexec.scheduler.nets.options import RunOptions
from dagexec.scheduler.nets.simple import SimpleNet
from dagexec.scheduler.plan.preparation import Preparation
from dagexec.scheduler.plan.preparation_cache import default_budget
from dagexec.scheduler.run.pool import WorkerPool

if not TYPE_CHECKING:
    captured = LazyModule("dagexec.scheduler.nets.captured")
else:
    from dagexec.scheduler.nets import captured


_KINDS = 64
"""Of inputs that are remembered beside those that something is prepared for."""

_MOST_RETURNS, _MOST_RETURNS_FOR_SHAPES = 8, 2
"""How often packed constants come back and go again: for replicas of a net with fixed shapes, and for other shapes."""


class Replica:
    """One net in a workspace of its own.

    Attributes:
        number: counts the replicas of an executor from 0.
        io_binding: how arrays get in and out for the shapes fed last; None before, and for a net on devices.
        arithmetic: the context for runs in a caller's thread.
        block_sizes: of how many rows it is or was prepared for.
        is_preparing: it is being prepared for the shapes fed last; those arrays have been read.
    """

    __slots__ = (
        "_by_kind", "_known", "_outputs", "_unsorted", "arithmetic", "block_sizes", "io_binding", "is_preparing", "net",
        "number", "workspace",
    )  # fmt: skip

    def __init__(self, number: int, workspace: Workspace, net: BaseNet, outputs: tuple[str, ...]) -> None:
        """`outputs` are those that runs mostly ask for."""
        self.number = number
        self.workspace = workspace
        self.net = net
        self.arithmetic = arithmetic_context()
        self.io_binding: IOBinding | None = None
        self.block_sizes = BlockSizes()
        self.is_preparing = False
        self._known: WeakKeyDictionary[Preparation, IOBinding] = WeakKeyDictionary()
        self._unsorted: WeakSet[Preparation] = WeakSet()
        self._by_kind: dict[Hashable, WeakSet[Preparation]] = {}
        self._outputs = outputs

    def feed(
        self, feeds: Mapping[str, Array], names: Sequence[str] = (), out: Mapping[str, Array] | None = None
    ) -> None:
        """Put the inputs where the net reads them, for a run whose results `names` go to `out` or new arrays.

        Raises what the net raises when it is prepared for other shapes, and FeedError when `out` does not fit.
        """
        io_binding = self.io_binding
        if io_binding is not None:
            arrays = arrays_like(io_binding.signature, feeds)
            if arrays is not None and io_binding.take_in(arrays, names, out):
                return
            io_binding.unbind()
        io_binding = self.io_binding = None  # its memory may be needed
        self.net.arena_memory.take_again()
        for name, array in feeds.items():
            try:
                self.workspace.feed_blob(name, array)
            except ResourceError as error:
                raise ResourceError(f"net {self.net.name!r}: input {name!r}: {error}") from None
        if self.net.on_host and not any(isinstance(value, Variant) for value in feeds.values()):
            self.is_preparing = True
            try:
                self.io_binding = self._found(feeds)
            finally:
                self.is_preparing = False
            self.io_binding.bind_results(names, out)

    def feed_rows(self, parts: Sequence[Mapping[str, Array]], axes: Mapping[str, int]) -> None:
        """Put the inputs of several requests where the net reads them: one behind the other along `axes`, others once.

        They have the same names and dtypes, and the same sizes but for those of `axes`. Raises what `feed` does.
        """
        joined = {name: [part[name] for part in (parts if name in axes else parts[:1])] for name in parts[0]}
        signature = tuple((name, arrays[0].dtype, _shape(arrays, axes.get(name))) for name, arrays in joined.items())
        if self.io_binding is not None:
            self.io_binding.unbind()
        targets = None if self.io_binding is None else self.io_binding.targets(signature)
        if targets is None:
            self.io_binding = None  # its memory may be needed
            self.net.arena_memory.take_again()
            targets = [self._resized(*kind) for kind in signature]
        for (name, arrays), target in zip(joined.items(), targets, strict=True):
            if name in axes:
                np.concatenate(arrays, axes[name], out=target)
            else:
                target[...] = arrays[0]
        if self.io_binding is None and self.net.on_host:
            self.io_binding = self._found(parts[0])

    def _resized(self, name: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
        """The array of an input, now of this shape."""
        try:
            return self.workspace.create_blob(name).tensor().resize(shape, from_numpy(dtype))
        except ResourceError as error:
            raise ResourceError(f"net {self.net.name!r}: input {name!r}: {error}") from None

    def _found(self, feeds: Mapping[str, Array]) -> IOBinding:
        """The I/O binding for what the net is prepared for now."""
        preparation = self.net.prepared()
        io_binding = self._known.get(preparation)
        if io_binding is None or io_binding.fed != tuple(feeds) or not io_binding.in_place():
            with garbage_collection_paused():
                io_binding = self._known[preparation] = IOBinding(self.net, preparation, tuple(feeds), self._outputs)
            self._unsorted.add(preparation)
        return io_binding

    def prepared_for(
        self, kind: Hashable, kind_of: Callable[[Signature], Hashable]
    ) -> Iterator[tuple[Signature, float]]:
        """Those inputs of one kind that the net is prepared for, and the seconds that a run is estimated to take.

        `kind_of` is the same function at all calls: each preparation is looked at once.
        """
        while self._unsorted:
            preparation = self._unsorted.pop()
            signature = self._known[preparation].signature if preparation in self._known else None
            if signature is not None:
                self._by_kind.setdefault(kind_of(signature), WeakSet()).add(preparation)
        if len(self._by_kind) > 2 * len(self._known) + _KINDS:
            self._by_kind = {known: preparations for known, preparations in self._by_kind.items() if preparations}
        for preparation in self._by_kind.get(kind, ()):
            io_binding = self._known.get(preparation)
            if io_binding is not None and io_binding.signature is not None:
                yield io_binding.signature, io_binding.estimated_seconds

    def fetch(self, names: Sequence[str], out: Mapping[str, Array] | None) -> Outputs:
        """The blobs called `names`, in arrays of `out` where it has them, else in new ones that the caller may keep."""
        if self.io_binding is not None:
            return self.io_binding.fetch(names, out)
        return {name: deliver(self.net, name, None if out is None else out.get(name)) for name in names}

    def peek(self, names: Sequence[str]) -> Outputs:
        """The blobs called `names` as they are after a run; the next one may write over the arrays."""
        found = {name: self.workspace.get_blob(name).get(Tensor) for name in names}
        arrays = {name: tensor.array if self.net.on_host else tensor.fetch() for name, tensor in found.items()}
        return {name: shown(self.net, array) for name, array in arrays.items()}

    def give_back_arena(self) -> int:
        """Give the memory of the net's arenas back until the next run; only while idle. How many bytes that are."""
        self.io_binding = None  # so the next run comes by `feed`
        return self.net.arena_memory.give_back()

    def unbind(self) -> None:
        """Let go of the caller's arrays. To be called after each run, however it ended."""
        if self.io_binding is not None:
            self.io_binding.unbind()


@dataclass(frozen=True)
class Replicas:
    """All replicas of a model, the workspace of their parameters, and the graph they share.

    `updates_parameters` tells that the net writes blobs it starts from, so that one run changes the next. `build` makes
    the net of one more with its workspace, which may keep one of so many portions for other shapes.
    """

    parameters: Workspace
    graph: Graph
    members: list[Replica]
    updates_parameters: bool
    build: Callable[[int], tuple[Workspace, BaseNet]]
    outputs: tuple[str, ...]

    def make(self, *, portions: int = 1) -> Replica:
        """One more replica, which is not a member yet.

        It may keep one of so many portions of what the options let a replica keep for other shapes. Raises what
        `build_replicas` does.
        """
        workspace, net = self.build(portions)
        return Replica(len(self.members), workspace, net, self.outputs)

    def fitting(self, feeds: Mapping[str, npt.ArrayLike]) -> dict[str, Array] | None:
        """`feeds`, if they are arrays like those that a replica was fed with last; these had been checked."""
        for replica in self.members:
            bound = replica.io_binding
            if bound is not None and (arrays := arrays_like(bound.signature, feeds)) is not None:
                return dict(zip(bound.fed, arrays, strict=True))
        return None

    def close(self) -> None:
        """Close every net. Idempotent."""
        for replica in self.members:
            replica.net.close()
            replica.net.arena_memory.leave_budget()


def _shape(arrays: Sequence[Array], axis: int | None) -> tuple[int, ...]:
    """That of `arrays` one behind the other along `axis`."""
    first = arrays[0].shape
    return first if axis is None else (*first[:axis], sum(one.shape[axis] for one in arrays), *first[axis + 1 :])


def build_replicas(
    model: Model,
    options: RunOptions,
    pool: WorkerPool,
    keep: frozenset[str] | None = None,
    parameters: Workspace | None = None,
    kept: Kept | None = None,
) -> Replicas:
    """The nets for `model` that `options` ask for, whose runs `pool` executes.

    `keep` names the blobs whose values are there when a run is over; others may share memory. None keeps all.
    `parameters` is a workspace with the model's parameters, and what was derived from them, of other replicas of the
    same parameters. `kept` was decided when the model was prepared elsewhere.

    Raises what `build_graph` and the nets raise, and what the init net raises; no net is left open
    then.
    """
    if parameters is None:
        parameters = parameter_workspace(model)
    net_def = placed_net(model, options.default_device, parameters)
    known = set(parameters.blobs()) | set(model.inputs)
    graph = build_graph(net_def, known.__contains__)
    constants = frozenset(parameters.blobs()) - graph.written - set(model.inputs)
    if uses_shared_buffer(net_def):
        for place in graph.devices:
            create_shared_buffer(parameters, place)
    _freeze(parameters, constants, has_fixed_shapes=_has_fixed_shapes(model))
    if kept is not None:
        kept.give_packed(parameters)

    own_parameters = graph.written.intersection(parameters.blobs())
    inputs, texts = tuple(model.inputs), model.texts  # and not the model, which has the parameters

    def build(portions: int) -> tuple[Workspace, BaseNet]:
        workspace = _child(parameters, inputs, own_parameters)
        workspace.texts = texts
        whole = default_budget() if options.preparation_bytes is None else options.preparation_bytes
        own = options if portions == 1 else replace(options, preparation_bytes=whole // portions)
        net = _make_net(own, net_def, workspace, pool, graph, constants, keep)
        if kept is not None:
            kept.give_chosen(net)
        return workspace, net

    found = Replicas(parameters, graph, [], bool(own_parameters), build, model.outputs)
    try:
        for _ in range(options.first_replicas):
            found.members.append(found.make())
    except BaseException:
        found.close()
        raise
    return found


def _freeze(parameters: Workspace, names: Iterable[str], *, has_fixed_shapes: bool) -> None:
    """Make the tensors called `names` constants, of which those that are packed need not stay in memory as they are.

    With fixed shapes each replica asks for them once, when it is prepared. For other shapes it may ask at any run:
    after a few they come back for good.
    """
    most_returns = _MOST_RETURNS if has_fixed_shapes else _MOST_RETURNS_FOR_SHAPES
    values = (parameters.get_blob(name).value for name in names)
    tensors = [value for value in values if isinstance(value, Tensor) and not value.is_view]
    for tensor in tensors:
        tensor.freeze()
        if tensor.constant is not None:
            tensor.constant.most_returns = most_returns


def _has_fixed_shapes(model: Model) -> bool:
    """True when all runs are of one shape."""
    return all(info.shape is not None and None not in info.shape for info in model.inputs.values())


def _child(parameters: Workspace, inputs: Collection[str], updated: Iterable[str]) -> Workspace:
    """A replica's workspace: parameters read through, but what it is fed with, or the net updates, is its own.

    A parameter that is `updated` starts in every replica with the value it has in `parameters`.
    """
    workspace = Workspace(parent=parameters)
    for name in itertools.chain(inputs, updated):
        initial = parameters.get_blob_or_none(name)
        blob = workspace.create_local_blob(name)
        if name in inputs:
            blob.tensor().grow_in_place()
        if initial is not None and isinstance(initial.value, Tensor) and not initial.value.is_empty:
            blob.tensor().feed(initial.value.array)
    return workspace


def _make_net(
    options: RunOptions,
    definition: Program,
    workspace: Workspace,
    pool: WorkerPool,
    graph: Graph,
    constants: frozenset[str],
    keep: frozenset[str] | None,
) -> BaseNet:
    if options.net_type == "simple":
        return SimpleNet(definition, workspace, graph=graph, constants=constants, keep=keep, options=options)
    net_class = DAGNet if options.net_type == "dag" else captured.CapturedNet if options.capture else AsyncDAGNet
    return net_class(definition, workspace, pool=pool, graph=graph, constants=constants, keep=keep, options=options)
