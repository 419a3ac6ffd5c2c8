"""Runs that are fed caches and give them back, as decoders are run without a session: steps as a session's.

What caches become is put into new arrays, and no length is prepared anew. Whether a run is a step follows from the
sizes of its inputs, until a few sizes had none: then all runs are the model's, whose last bits may be others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

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
from dagexec.executor.sessions.names import RANK
from dagexec.executor.sessions.sizes import LEAST_BOUND, MOST_AT_ONCE, Growth, Types, learned
from dagexec.executor.sessions.steps import StepNet, StepNets
from dagexec.executor.source.types import GivenTypes
from dagexec.platform.records import dataclass

_MOST_REFUSALS = 3
"""Runs of sizes that have no step, after which none is looked for."""

LEAST_END = 8
"""Positions behind a run, for which there are kernels; for fewer the model is run as it is."""

_MOST_KINDS = 4
"""Sizes that steps are looked up for."""


@dataclass(frozen=True)
class _Kind:
    """Runs that are steps of one net.

    Attributes:
        types: of all inputs, with full caches.
        growth: of inputs, axes that are as long as the caches, and by how much they are longer.
        added: how many positions a run adds.
        bound: how many there may be then.
        net: the net.
    """

    types: Types
    growth: Growth
    added: int
    bound: int
    net: StepNet

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
        executor: who runs it.
        fed: what that is fed.
        call: what it is asked for.
        names: the outputs for the caller.
        out: the caller's arrays for outputs.
        pairs: the outputs that caches become, by input.
        layers: what is in the caches.
        caches: what they become.
    """

    executor: ModelRunner
    fed: Mapping[str, Array]
    call: Call
    names: Sequence[str]
    out: Mapping[str, Array]
    pairs: Mapping[str, str]
    layers: Sequence[Layer]
    caches: Caches

    def results(self, outputs: Outputs) -> Outputs:
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
                    check_result(self.executor.model.name, output, array, target)
                    target[...] = array
                    outputs[output] = target
        return {name: outputs[name] for name in self.names}


class FedSteps:
    """Of one executor."""

    def __init__(self, runner: ModelRunner, pairs: Mapping[str, str], types: GivenTypes, nets: StepNets) -> None:
        """`pairs` are the outputs that caches become, by input, `types` the model's, `nets` those of its steps."""
        self._runner, self._pairs, self._types, self._nets = runner, pairs, types, nets
        self._kinds: tuple[_Kind, ...] = ()
        self._refusals = 0

    def arrays(self, feeds: Feeds | npt.ArrayLike) -> dict[str, Array] | None:
        """What is fed of a run that may be a step; None for others."""
        if self._refusals >= _MOST_REFUSALS or not isinstance(feeds, Mapping):
            return None
        arrays = {name: array for name, array in feeds.items() if isinstance(array, np.ndarray)}
        if len(arrays) < len(feeds) or not self._pairs.keys() <= arrays.keys():
            return None
        return None if any(arrays[name].ndim != RANK for name in self._pairs) else arrays

    def knows(self, arrays: Mapping[str, Array]) -> bool:
        """There is a net for these sizes already."""
        return self._known(arrays) is not None

    def find(self, arrays: Mapping[str, Array], call: Call) -> FedStep | None:
        """What is run in place of the model; None for a run that is no step."""
        found = self._known(arrays) or self._made(arrays)
        if found is None:
            return None
        kind, length = found
        names = list(self._runner.outputs if call.outputs is None else call.outputs)
        others = [name for name in names if name not in self._pairs.values()]
        layers = kind.net.net.layers
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
        return FedStep(kind.net.executor, fed, asked, names, out, self._pairs, layers, caches)

    def _known(self, arrays: Mapping[str, Array]) -> tuple[_Kind, int] | None:
        """Which steps a run is one of, and how many positions are in its caches."""
        first = next(iter(self._pairs))
        for kind in self._kinds:
            length = arrays[first].shape[kind.growth[first][0]]
            if kind.takes(arrays, length):
                return kind, length
        return None

    def _made(self, arrays: Mapping[str, Array]) -> tuple[_Kind, int] | None:
        try:
            types = {name: TensorType(array.shape, from_numpy(array.dtype)) for name, array in arrays.items()}
        except DagexecError:
            return None  # the run tells what is wrong
        results = self._types.blobs(types) or {}
        before = {name: types[name] for name in self._pairs}
        sizes = learned(types, before, {name: results.get(output) for name, output in self._pairs.items()})
        if sizes is None or sizes.axes.keys() != self._pairs.keys():
            self._refusals += 1
            return None
        if sizes.end < LEAST_END or sizes.added > MOST_AT_ONCE:
            return None
        growth = {name: (axis, 0) for name, axis in sizes.axes.items()}
        for name, whole in types.items():
            shape = self._runner.inputs[name].shape or ()
            if name not in growth and len(shape) == len(whole.shape):
                pairs = enumerate(zip(shape, whole.shape, strict=True))
                axes = [axis for axis, (stated, size) in pairs if stated is None and size == sizes.end]
                if axes:
                    growth[name] = axes[0], sizes.added
        bound = max(LEAST_BOUND, 1 << (sizes.end - 1).bit_length())
        for name, (axis, more) in growth.items():
            shape = types[name].shape
            full = (*shape[:axis], bound - sizes.added + more, *shape[axis + 1 :])
            types[name] = TensorType(full, types[name].meta)
        net = self._nets.find(self._pairs, types, growth, bound - sizes.added)
        if net is None:
            self._refusals += 1
            return None
        kind = _Kind(types, growth, sizes.added, bound, net)
        self._kinds = (kind, *self._kinds[: _MOST_KINDS - 1])
        return kind, sizes.length
