"""I/O binding: how arrays get into and out of a replica whose net is prepared for their shapes.

An array is copied to where the net reads it, and a result from where the net writes it. Where every step that touches
such a blob can be rebound to another array (`Prepared.input_rebinds` and `output_rebinds`), a large array is not
copied: the steps are bound to the caller's for the run, and back to the replica's own when it is over, so that
nothing holds on to the caller's.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dagexec.core.blob import Blob
from dagexec.core.operator import Rebind
from dagexec.core.tensor import Tensor, binding_epoch
from dagexec.core.variant import as_texts
from dagexec.errors import FeedError, ResourceError
from dagexec.platform.host_memory import check_fits
from dagexec.scheduler.nets.net import BaseNet
from dagexec.scheduler.plan import bindings
from dagexec.scheduler.plan.preparation import Preparation
from dagexec.scheduler.run.inline import InlineSteps
from dagexec.scheduler.run.overhead import WORTH_SHARING
from dagexec.scheduler.run.run import Run

Array = npt.NDArray[Any]
Outputs = dict[str, Array]
Signature = tuple[tuple[str, np.dtype[Any], tuple[int, ...]], ...]

MIN_BYTES_CHECKED = 1 << 20
"""Below this nobody asks whether memory suffices for a result."""


class BoundTensor:
    """Where a blob's array is: the replica's own, or for a run one of the caller's.

    Attributes:
        name: the blob's.
        array: the replica's own array.
        rebinds: what points the steps that touch the blob at another array; empty when not all of them can be.
        is_bound: they may be pointed at another one.
    """

    __slots__ = ("array", "is_bound", "name", "rebinds")

    def __init__(self, name: str, array: Array, rebinds: tuple[Rebind, ...]) -> None:
        self.name = name
        self.array = array
        self.rebinds = rebinds if array.nbytes >= bindings.MIN_BYTES_BOUND else ()
        self.is_bound = False

    def bind(self, array: Array) -> None:
        """Have the steps work on `array`, of the same shape and dtype."""
        self.is_bound = True  # first: an interrupt may come between two of them
        for rebind in self.rebinds:
            rebind(array)

    def unbind(self) -> None:
        """Have the steps work on the replica's own array."""
        for rebind in self.rebinds:
            rebind(self.array)
        self.is_bound = False


_TRIALS = 8
"""How many runs are looked at, as one may have been disturbed."""


class IOBinding:
    """Places of the inputs and outputs of one replica, for one preparation of its net. For one run at a time.

    Attributes:
        fed: names of the inputs.
        copied: the results for which all that comes in or goes out is copied; None when something is moved for them.
        signature: name, dtype and shape of each input; None when one of them is text.
        name_step: how errors name the operator of one of them.
        is_shared: several threads may find something to do in a run, and it is worth that.
        estimated_seconds: what a run takes by the work of its operators.
        seconds: the longer of the last two runs that were measured, with feeding and fetching; else infinity.
        seconds_at_best: the shorter of these.
        shortest: what the shortest of all runs took that were measured; else infinity.
    """

    __slots__ = (
        "_bound_results", "_copies", "_epoch", "_inputs", "_large", "_last", "_names", "_net", "_outputs",
        "_overwritten", "_preparation", "_steps", "_targets", "_trials", "copied", "estimated_seconds", "fed",
        "is_shared", "name_step", "seconds", "seconds_at_best", "shortest", "signature",
    )  # fmt: skip

    def __init__(self, net: BaseNet, preparation: Preparation, fed: Sequence[str], outputs: Sequence[str]) -> None:
        """To be made when `preparation` is the net's current one. `outputs` are those that runs mostly ask for."""
        self._net = net
        self._preparation = weakref.ref(preparation)
        self._epoch = -1
        self.seconds = self.seconds_at_best = self.shortest = self._last = math.inf
        self.fed = tuple(fed)
        self._names = frozenset(fed)
        self._steps: InlineSteps | None = None
        self.name_step = preparation.name_step
        self.is_shared = net.shares_work(preparation)
        self._trials = 0 if net.policy is not None and len(preparation.plan.chains) > 1 else _TRIALS
        self.estimated_seconds = sum(preparation.seconds)
        self._overwritten: set[str] = set()
        uses = _uses(net, [net.workspace.get_blob(name) for name in (*fed, *outputs)])
        self._inputs = self._find_inputs(preparation, fed, uses)
        self._outputs: dict[str, BoundTensor | None] = {}
        self._find_outputs(outputs, uses)
        self._bound_results: Outputs = {}
        arrays = [place.array for place in self._inputs]
        self.signature: Signature | None = None
        if all(array.dtype != np.object_ for array in arrays):
            self.signature = tuple((p.name, p.array.dtype, p.array.shape) for p in self._inputs)
        self.copied: tuple[str, ...] | None = None
        self._copies: list[tuple[str, Array | None]] = []  # None for what is not to be copied just so
        self._targets = arrays
        places = [self._outputs[name] for name in outputs]
        found = [place for place in (*places, *self._inputs) if place is not None]
        if self.signature is not None and not any(place.rebinds for place in found):
            self.copied = tuple(outputs)
            known = (None if place is None else place.array for place in places)
            plain = (None if array is None or array.dtype == np.object_ else array for array in known)
            self._copies = list(zip(outputs, plain, strict=True))
        self._large = sum(array.nbytes for _, array in self._copies if array is not None) >= MIN_BYTES_CHECKED

    @property
    def steps(self) -> InlineSteps:
        """All steps in list order, some of them joined; only while the preparation lives.

        Whoever wants a run in the caller's thread to stop, and none after it, clears the list.
        """
        if self._steps is None:
            preparation = self._preparation()
            assert preparation is not None
            self._steps = InlineSteps(preparation.in_order)
        return self._steps

    def in_place(self) -> bool:
        """True while the net is prepared, and its inputs are where they were, as when these were made."""
        if self._epoch == binding_epoch():
            return True
        preparation = self._preparation()
        if preparation is None or not preparation.bindings.in_place() or not all(map(self._holds, self._inputs)):
            return False
        self._epoch = binding_epoch()
        return True

    def took(self, seconds: float) -> None:
        """A run is over that took so long."""
        self.seconds = max(self._last, seconds)
        self.seconds_at_best = min(self._last, seconds)
        self.shortest = min(self.shortest, seconds)
        self._last = seconds

    def ran(self, run: Run) -> None:
        """`run` is over. Of the first few it is found out whether they are worth sharing."""
        if not (self.is_shared and self._trials):
            return
        self._trials -= 1
        seconds = run.native_seconds()
        self.is_shared = seconds is None or seconds >= WORTH_SHARING

    def targets(self, signature: Signature) -> list[Array] | None:
        """Where to write inputs of this `signature` for a run that reads them there; None for other ones."""
        if signature != self.signature or not self.in_place():
            return None
        return self._targets

    def take_in(self, arrays: Sequence[Array], names: Sequence[str], out: Mapping[str, Array] | None) -> bool:
        """Have a run read `arrays`, in the order of the signature, and its results `names` written where they go.

        Those are the arrays of `out`, where it has them, else new ones. False, and nothing is done, when the net is not
        `in_place`. Raises FeedError when an array of `out` has not the dtype or shape of its result.
        """
        if self._epoch != binding_epoch() and not self.in_place():
            return False
        if self.copied != names:
            self.feed(arrays, names)
            self.bind_results(names, out)
            return True
        if out is not None:
            self.check(out)
        for target, array in zip(self._targets, arrays):  # noqa: B905 - as many as the signature has
            target[...] = array
        return True

    def feed(self, arrays: Sequence[Array], names: Sequence[str]) -> None:
        """Put the inputs, in the order of the signature, where the net reads them; `names` will be fetched."""
        for place, array in zip(self._inputs, arrays, strict=True):
            if place.rebinds and _is_plain(array) and self._names.isdisjoint(names):
                place.bind(array)
            else:
                if place.is_bound:
                    place.unbind()
                place.array[...] = array

    def check(self, out: Mapping[str, Array]) -> None:
        """Raise FeedError, where `copied` is set, when an array of `out` has not the dtype or shape of its result."""
        for name, target in out.items():
            place = self._outputs.get(name)
            if place is not None and (target.dtype is not place.array.dtype or target.shape != place.array.shape):
                check_result(self._net.name, name, place.array, target)

    def bind_results(self, names: Sequence[str], out: Mapping[str, Array] | None) -> None:
        """Have large results written to where the caller gets them. To be called before a run.

        Raises FeedError when an array of `out` has not the dtype or shape of its result.
        """
        if self.copied == names:
            if out is not None:
                self.check(out)
            return
        self._find_outputs(names)
        for name in names:
            place = self._outputs[name]
            if place is None:
                continue
            target = None if out is None else out.get(name)
            if target is not None:
                check_result(self._net.name, name, place.array, target)
            if place.rebinds:
                if target is None:
                    target = new_result(self._net.name, name, place.array)
                elif not _is_plain(target):
                    continue
                self._bound_results[name] = target
                place.bind(target)

    def fetch(self, names: Sequence[str], out: Mapping[str, Array] | None) -> Outputs:
        """The results of a run, in arrays that are the caller's."""
        results: Outputs = {}
        if self.copied == names:
            for name, array in self._copies:
                target = None if out is None else out.get(name)
                if array is None:
                    results[name] = self._delivered(name, target)
                elif target is None:
                    results[name] = _copied(self._net.name, name, array, None) if self._large else array.copy()
                else:
                    target[...] = array
                    results[name] = target
            return results
        self._find_outputs(names)
        for name in names:
            aimed = self._bound_results.get(name)
            if aimed is not None:
                results[name] = aimed
                continue
            results[name] = self._delivered(name, None if out is None else out.get(name))
        return results

    def _delivered(self, name: str, target: Array | None) -> Array:
        """One result, in `target` or a new array."""
        place = self._outputs[name]
        if place is None:
            return deliver(self._net, name, target)
        return _copied(self._net.name, name, shown(self._net, place.array), target)

    def unbind(self) -> None:
        """Let go of all arrays that are not the replica's. To be called after a run, however it ended."""
        for place in self._inputs:
            if place.is_bound:
                place.unbind()
        if self._bound_results:
            for result in self._outputs.values():
                if result is not None and result.is_bound:
                    result.unbind()
            self._bound_results.clear()

    def _holds(self, place: BoundTensor) -> bool:
        """True while the blob of an input, which the net need not read, has the array that is fed."""
        if place.name in self._overwritten:
            return True
        value = self._net.workspace.get_blob(place.name).value
        return isinstance(value, Tensor) and value.current_array() is place.array

    def _find_inputs(self, preparation: Preparation, names: Sequence[str], uses: _Uses) -> list[BoundTensor]:
        """The places of the inputs."""
        blobs = [self._net.workspace.get_blob(name) for name in names]
        views = {id(binding.blob) for binding in preparation.bindings.outputs if binding.is_view}
        found = []
        for name, blob in zip(names, blobs, strict=True):
            tensor = blob.get(Tensor)
            if id(blob) in views:  # the net makes it a view before it reads it: what is fed would go to another blob
                self._overwritten.add(name)
                found.append(BoundTensor(name, np.empty_like(tensor.array), ()))
                continue
            rebinds = _rebinds(self._net, preparation, uses[id(blob)], written=False) if tensor.is_packed else ()
            found.append(BoundTensor(name, tensor.array, rebinds))
        return found

    def _find_outputs(self, names: Sequence[str], uses: _Uses | None = None) -> None:
        """Look for the places of those blobs that none was looked for yet, whose `uses` may be known.

        There is None where the array may be another after each run.
        """
        missing = [name for name in names if name not in self._outputs]
        if not missing:
            return
        preparation = self._preparation()
        blobs = [self._net.workspace.get_blob(name) for name in missing]
        uses = uses or _uses(self._net, blobs)
        bound = set() if preparation is None else {id(binding.blob) for binding in preparation.bindings.outputs}
        for name, blob in zip(missing, blobs, strict=True):
            if preparation is None or id(blob) not in bound:
                self._outputs[name] = None
                continue
            tensor = blob.get(Tensor)
            own = tensor.is_packed and not tensor.is_view and name not in self._names
            rebinds = _rebinds(self._net, preparation, uses[id(blob)], written=True) if own else ()
            self._outputs[name] = BoundTensor(name, tensor.array, rebinds)


def arrays_like(signature: Signature | None, feeds: Mapping[str, npt.ArrayLike]) -> list[Array] | None:
    """`feeds` in the order of `signature`; None unless they are arrays of its names, dtypes and shapes."""
    if signature is None or len(feeds) != len(signature):
        return None
    arrays: list[Array] = []
    for name, dtype, shape in signature:
        array = feeds.get(name)
        if array.__class__ is not np.ndarray or array.shape != shape:
            return None
        if array.dtype is not dtype and array.dtype != dtype:  # an array that was unpickled has a dtype of its own
            return None
        arrays.append(array)
    return arrays


def check_result(net: str, name: str, array: Array, target: Array) -> None:
    """Raise FeedError unless `target`, which a caller gave for a result, has the dtype and shape of `array`."""
    if target.dtype != array.dtype or target.shape != array.shape:
        raise FeedError(
            f"net {net!r}: out[{name!r}] must be {array.dtype} of shape {array.shape}, "
            f"found {target.dtype} of shape {target.shape}"
        )


def deliver(net: BaseNet, name: str, target: Array | None) -> Array:
    """What blob `name` holds, copied to `target` or to a new array. Raises FeedError when `target` does not fit."""
    if target is None:
        return net.workspace.fetch_blob(name)
    tensor = net.workspace.get_blob(name).get(Tensor)
    array = tensor.array if net.on_host else tensor.fetch()
    check_result(net.name, name, array, target)
    return _copied(net.name, name, shown(net, array), target)


def shown(net: BaseNet, array: Array) -> Array:
    """A result as callers see it: strings as `str` where the model has them so."""
    return as_texts(array) if array.dtype == np.object_ and net.workspace.texts else array


def _copied(net: str, name: str, array: Array, target: Array | None) -> Array:
    if target is None:
        target = new_result(net, name, array)
    target[...] = array
    return target


def new_result(net: str, name: str, like: Array) -> Array:
    """An array for a result. Raises ResourceError when memory does not suffice."""
    what = f"net {net!r}: result {name!r} of shape {like.shape}, for the caller"
    if like.nbytes >= MIN_BYTES_CHECKED:
        check_fits(like.nbytes, what)
    try:
        return np.empty(like.shape, like.dtype)
    except MemoryError:
        raise ResourceError(f"{what} needs {like.nbytes:,} bytes; the system refused the allocation") from None


def _is_plain(array: Array) -> bool:
    flags = array.flags
    return bool(flags.c_contiguous and flags.aligned)


_Use = tuple[int, int, bool]
"""An operator that touches a blob, the index of it among its inputs or outputs, and whether it is an output."""

_Uses = dict[int, list[_Use]]
"""By the id of a blob, who touches it, in list order."""


def _uses(net: BaseNet, blobs: Sequence[Blob]) -> _Uses:
    """Those of `blobs`."""
    found: _Uses = {id(blob): [] for blob in blobs}
    for index, operator in enumerate(net.operators):
        for written, touched in ((False, operator.input_blobs), (True, operator.output_blobs)):
            for place, blob in enumerate(touched):
                row = found.get(id(blob))
                if row is not None:
                    row.append((index, place, written))
    return found


def _rebinds(net: BaseNet, preparation: Preparation, uses: Sequence[_Use], *, written: bool) -> tuple[Rebind, ...]:
    """What rebinds every step that reads a blob of these uses, and the one that writes it if it is `written`.

    Empty when one of them cannot be rebound, works in place, or hands its memory on.
    """
    found: list[Rebind] = []
    uses = [use for use in uses if use[2] or not preparation.prepared[use[0]].is_settled]
    writers = [index for index, _, writes in uses if writes]
    if len(writers) != int(written) or any(index in writers for index, _, writes in uses if not writes):
        return ()
    for index, place, writes in uses:
        prepared = preparation.prepared[index]
        rebind = (prepared.output_rebinds if writes else prepared.input_rebinds).get(place)
        if rebind is None or index in net.graph.views:
            return ()
        found.append(rebind)
    return tuple(found)
