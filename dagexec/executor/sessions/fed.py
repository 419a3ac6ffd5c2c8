"""Runs that are fed caches and give them back, as decoders are run without a session: steps as a session's.

What caches become is put into new arrays, and no length is prepared anew. Whether a run is a step, and of which net,
follows from the sizes of its inputs alone: a step may have other last bits than a run of the model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt

from dagexec.binding.io_binding import Array, Outputs, check_result
from dagexec.compiler.stepping import CACHE, LENGTH, Layer
from dagexec.core.caches import Caches
from dagexec.core.dtypes import from_numpy
from dagexec.core.feeds import Feeds
from dagexec.core.schema import TensorType
from dagexec.errors import DagexecError
from dagexec.executor.model_runner import ModelRunner
from dagexec.executor.requests.call import Call
from dagexec.executor.requests.waiting import on_a_thread
from dagexec.executor.sessions.names import RANK
from dagexec.executor.sessions.sizes import LEAST_BOUND, MOST_AT_ONCE, Growth, StepSizes, Types, learned, longer
from dagexec.executor.sessions.steps import StepNet, StepNets
from dagexec.executor.source.types import GivenTypes
from dagexec.platform.records import dataclass

LEAST_END = 8
"""Positions behind a run, for which there are kernels; for fewer the model is run as it is."""

_MOST_KINDS = 16
"""Kinds of runs that are remembered, and sizes that belong to none."""


@dataclass(frozen=True)
class _Kind:
    """Runs that are steps of one net.

    Attributes:
        types: of all inputs, with full caches.
        growth: of inputs, axes that are as long as the caches, and by how much they are longer.
        added: how many positions a run adds.
        bound: how many there may be then.
        net: the net; None where there is none.
        is_certain: what grows is as long as the caches by need, not by chance.
    """

    types: Types
    growth: Growth
    added: int
    bound: int
    net: StepNet | None
    is_certain: bool

    def takes(self, arrays: Mapping[str, Array], length: int) -> bool:
        """True for inputs of these sizes, with so many positions in caches."""
        if arrays.keys() != self.types.keys() or not LEAST_END <= length + self.added <= self.bound:
            return False
        for name, array in arrays.items():
            kind, (axis, more) = self.types[name], self.growth.get(name, (-1, 0))
            if array.dtype != kind.meta.numpy or array.ndim != len(kind.shape):
                return False
            if axis >= 0 and array.shape[axis] != length + more:
                return False
            if any(
                own != size
                for place, (own, size) in enumerate(zip(array.shape, kind.shape, strict=True))
                if place != axis
            ):
                return False
        return True


@dataclass(frozen=True)
class FedStep:
    """One such run.

    Attributes:
        net: of the step.
        fed: what its executor is fed.
        call: what it is asked for.
        names: the outputs for the caller.
        out: the caller's arrays for outputs.
        pairs: the outputs that caches become, by input.
        layers: what is in the caches.
        caches: what they become.
    """

    net: StepNet
    fed: Mapping[str, Array]
    call: Call
    names: Sequence[str]
    out: Mapping[str, Array]
    pairs: Mapping[str, str]
    layers: Sequence[Layer]
    caches: Caches

    def run(self) -> Outputs:
        """The outputs. Raises what `ModelRunner.run` does, and FeedError for an array that does not fit."""
        return self._results(self.net.executor._run(self.fed, self.call))

    async def run_async(self) -> Outputs:
        """As `run`, for a task."""
        return self._results(await self.net.executor._run_async(self.fed, self.call))

    def _results(self, outputs: Outputs) -> Outputs:
        """The outputs that were asked for, of those of the net. Raises FeedError for an array that does not fit."""
        for layer in self.layers:
            for name, made, axes in (
                (layer.keys, self.caches.keys, layer.key_axes),
                (layer.values, self.caches.values, layer.value_axes),
            ):
                output = self.pairs[name]
                if output not in self.names:
                    continue
                array = made[name].transpose(np.argsort(axes))
                target = self.out.get(output)
                if target is None:
                    outputs[output] = np.ascontiguousarray(array)
                else:
                    check_result(self.net.executor.model.name, output, array, target)
                    target[...] = array
                    outputs[output] = target
        return {name: outputs[name] for name in self.names}


class FedSteps:
    """Of one executor."""

    def __init__(self, runner: ModelRunner, pairs: Mapping[str, str], types: GivenTypes, nets: StepNets) -> None:
        """`pairs` are the outputs that caches become, by input, `types` the model's, `nets` those of its steps."""
        self._runner, self._pairs, self._types, self._nets = runner, pairs, types, nets
        self._kinds: tuple[_Kind, ...] = ()
        self._others: tuple[Types, ...] = ()

    def step(self, feeds: Feeds | npt.ArrayLike, call: Call) -> FedStep | None:
        """What is run in place of the model; None for a run that is no step."""
        arrays = self._arrays(feeds)
        return None if arrays is None else self._found(arrays, call)

    async def step_async(self, feeds: Feeds | npt.ArrayLike, call: Call) -> FedStep | None:
        """As `step`, for a task: a net is made on another thread."""
        arrays = self._arrays(feeds)
        if arrays is None or self._known(arrays) is not None:
            return None if arrays is None else self._found(arrays, call)
        return await on_a_thread(f"dagexec-{self._runner.model.name}-steps", partial(self._found, arrays, call))

    def _arrays(self, feeds: Feeds | npt.ArrayLike) -> dict[str, Array] | None:
        """What is fed of a run that may be a step; None for others."""
        if not isinstance(feeds, Mapping):
            return None
        arrays = {name: array for name, array in feeds.items() if isinstance(array, np.ndarray)}
        if len(arrays) < len(feeds) or not self._pairs.keys() <= arrays.keys():
            return None
        return None if any(arrays[name].ndim != RANK for name in self._pairs) else arrays

    def _found(self, arrays: Mapping[str, Array], call: Call) -> FedStep | None:
        """See `step`."""
        known = self._known(arrays) or self._made(arrays)
        if known is None or known[0].net is None:
            return None
        kind, length = known
        net = known[0].net
        names = list(self._runner.outputs if call.outputs is None else call.outputs)
        others = [name for name in names if name not in self._pairs.values()]
        layers = net.net.layers
        by_head = {layer.keys: arrays[layer.keys].transpose(layer.key_axes) for layer in layers}
        by_head |= {layer.values: arrays[layer.values].transpose(layer.value_axes) for layer in layers}
        caches = Caches(by_head)
        fed = {name: array for name, array in arrays.items() if name not in self._pairs}
        for name, (axis, _) in kind.growth.items():
            if name in fed:
                whole = np.zeros(kind.types[name].shape, fed[name].dtype)
                whole[(*(slice(None),) * axis, slice(fed[name].shape[axis]))] = fed[name]
                fed[name] = whole
        fed[CACHE], fed[LENGTH] = np.array([caches.number]), np.array([length])
        out = call.out or {}
        asked = call._replace(outputs=others, out={name: out[name] for name in others if name in out} or None)
        return FedStep(net, fed, asked, names, out, self._pairs, layers, caches)

    def _known(self, arrays: Mapping[str, Array]) -> tuple[_Kind, int] | None:
        """Which runs known already it is one of, and how many positions are in its caches."""
        first = next(iter(self._pairs))
        for kind in self._kinds:
            length = arrays[first].shape[kind.growth[first][0]]
            if kind.takes(arrays, length) and (kind.is_certain or self._grow_alone(kind, arrays, length + kind.added)):
                return kind, length
        return None

    def _grow_alone(self, kind: _Kind, arrays: Mapping[str, Array], end: int) -> bool:
        """No other input has the size `end`."""
        return self._as_long(arrays, end).keys() == kind.growth.keys() - self._pairs.keys()

    def _as_long(self, arrays: Mapping[str, Array], end: int) -> dict[str, int]:
        """Inputs that are no caches, and the first axis of free size of each that has the size `end`."""
        axes: dict[str, int] = {}
        for name, array in arrays.items():
            stated = self._runner.inputs[name].shape or ()
            if name not in self._pairs and len(stated) == array.ndim and end in array.shape:
                pairs = enumerate(zip(stated, array.shape, strict=True))
                free = [axis for axis, (size, own) in pairs if size is None and own == end]
                axes |= {name: free[0]} if free else {}
        return axes

    def _made(self, arrays: Mapping[str, Array]) -> tuple[_Kind, int] | None:
        """The runs that it is the first one known of; None where caches do not grow by some positions."""
        try:
            types = {name: TensorType(array.shape, from_numpy(array.dtype)) for name, array in arrays.items()}
        except DagexecError:
            return None  # the run tells what is wrong
        if types in self._others:
            return None
        sizes = self._learned(types)
        if sizes is None or sizes.end < LEAST_END or sizes.added > MOST_AT_ONCE:
            self._others = (types, *self._others[: _MOST_KINDS - 1])
            return None
        axes = self._as_long({name: np.broadcast_to(np.int8(), kind.shape) for name, kind in types.items()}, sizes.end)
        needed = self._needed(types, sizes, axes)
        growth = {name: (axis, 0) for name, axis in sizes.axes.items()}
        growth |= {name: (axes[name], sizes.added) for name in needed or axes}
        bound = max(LEAST_BOUND, 1 << (sizes.end - 1).bit_length())
        full = {name: longer(types[name], axis, bound - sizes.end) for name, (axis, _) in growth.items()}
        net = self._nets.find(self._pairs, {**types, **full}, growth, bound - sizes.added)
        kind = _Kind({**types, **full}, growth, sizes.added, bound, net, bool(needed))
        self._kinds = (kind, *self._kinds[: _MOST_KINDS - 1])
        return kind, sizes.length

    def _learned(self, types: Types) -> StepSizes | None:
        """What inference tells of the sizes of a run; None where not all caches grow by some positions."""
        results = self._types.blobs(types) or {}
        before = {name: types[name] for name in self._pairs}
        sizes = learned(types, before, {name: results.get(output) for name, output in self._pairs.items()})
        return sizes if sizes is not None and sizes.axes.keys() == self._pairs.keys() else None

    def _needed(self, types: Types, sizes: StepSizes, axes: Mapping[str, int]) -> list[str]:
        """Of inputs that are as long as caches those that have to be: inference refuses longer caches with them."""
        grown = {name: longer(types[name], axis, 1) for name, axis in {**sizes.axes, **axes}.items()}
        return [name for name in axes if self._types.blobs({**types, **grown, name: types[name]}) is None]
