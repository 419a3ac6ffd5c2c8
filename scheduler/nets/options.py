"""RunOptions: how a net runs. The other options of `dagexec.compile` are in `dagexec.options`."""

from __future__ import annotations

from numbers import Integral
from typing import TYPE_CHECKING, Self

from dagexec.core.device import CPU, Device
from dagexec.errors import DeviceError, SchemaError, SettingError
from dagexec.platform import processor
from dagexec.platform.lazy import LazyModule
from dagexec.platform.records import dataclass
from dagexec.scheduler.run.pool import MAX_WORKERS
from dagexec.scheduling.policy import Policy

if not TYPE_CHECKING:
    catalog = LazyModule("dagexec.scheduling.catalog")
else:
    from dagexec.scheduling import catalog


NET_TYPES = ("simple", "dag", "async_dag")
STREAM_PRIORITIES = ("normal", "high")


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """How a model runs.

    How it runs:
        net_type: `simple`, `dag` or `async_dag`; None to have it chosen.
        num_workers: threads of the pool; None for as many as there are cores, and for `simple` no more than `replicas`.
        intra_op_threads: the most threads that work on one operator at the same time, whose pieces they share; None for
            no limit. Results have the same bytes with any number.
        replicas: how many runs may be in flight at once. Parameters are shared; each replica has its own activations.
            None: 1; where nothing else of how the model runs is given, more as soon as requests wait for one another
            (docs/embedding.md).
        device: where operators run that name no device: "cpu", "cuda:N" or "sim:N". "cpu" puts all of them there,
            whatever devices the file names. None: "cpu" for those that name none.
        streams_per_worker: streams of each device on which a worker launches what one replica computes.
        stream_priority: "normal", or "high" for streams that a device prefers where several have work.
        preparation_bytes: the most bytes that a replica keeps for input shapes beside those of its latest run, so that
            they need not be prepared for again when they come back; an estimate (docs/memory.md). 0 keeps none. None:
            256 MiB, and at most a 64th of the machine's memory.
        capture: on a device, record the second run for each shape, all its streams and events, and replay it from then
            on at the cost of one launch (docs/cuda.md); for net type `async_dag`, which it chooses by default.
        policy: which chain runs next, and on which worker: the name of a policy, or a `dagexec.scheduling.Policy` or
            its class (docs/scheduling.md). None: by the critical path. For net types `dag`, which it chooses by
            default, and `async_dag`. Results have the same bytes with any.
    """

    net_type: str | None = None
    num_workers: int | None = None
    intra_op_threads: int | None = None
    replicas: int | None = None
    device: str | None = None
    streams_per_worker: int = 1
    stream_priority: str = "normal"
    preparation_bytes: int | None = None
    capture: bool = False
    policy: str | Policy | type[Policy] | None = None

    def __post_init__(self) -> None:
        """Raises SchemaError for an unknown net type, DeviceError for an unknown device, or one that captures nothing.

        SettingError is for anything else that is out of range.
        """
        if self.net_type is not None and self.net_type not in NET_TYPES:
            raise SchemaError(f"net type {self.net_type!r} is unknown; expected one of {', '.join(NET_TYPES)}")
        counts = (("replica", self.replicas), ("intra-op thread", self.intra_op_threads), ("worker", self.num_workers))
        for what, count in counts:
            if count is not None and (not isinstance(count, Integral) or count < 1):
                raise SettingError(f"at least 1 {what} is needed, found {count!r:.80}")
            if count is not None and count > MAX_WORKERS:
                raise SettingError(f"at most {MAX_WORKERS} {what}s are made, not {count}")
        if not isinstance(self.streams_per_worker, Integral) or self.streams_per_worker < 1:
            raise SettingError(f"at least 1 stream per worker is needed, found {self.streams_per_worker}")
        nbytes = self.preparation_bytes
        if nbytes is not None and (not isinstance(nbytes, Integral) or nbytes < 0):
            raise SettingError(f"preparation_bytes must be 0 or more, or None, not {nbytes!r:.80}")
        if self.stream_priority not in STREAM_PRIORITIES:
            raise SettingError(f"stream_priority is 'normal' or 'high', not {self.stream_priority!r}")
        if self.capture and self.default_device == CPU:
            raise DeviceError("capture is for cuda:N and sim:N: on cpu there is nothing to capture")
        if self.capture and self.net_type not in (None, "async_dag"):
            raise SettingError(f"capture is for net type 'async_dag', not {self.net_type!r}")
        if self.policy is not None:
            object.__setattr__(self, "policy", catalog.find_policy(self.policy))
            if self.net_type == "simple":
                raise SettingError("a policy is for net types 'dag' and 'async_dag', not 'simple'")
            if self.capture:
                raise SettingError("a policy decides in every run: it cannot be combined with capture")

    def with_chosen(self, **fields: object) -> Self:
        """These with fields that were chosen here: only fields given by a caller have to be checked."""
        options = object.__new__(type(self))
        options.__dict__.update(self.__dict__, **fields)
        return options

    @property
    def default_device(self) -> Device:
        """The device of operators that name none. Raises DeviceError."""
        return CPU if self.device is None else Device.parse(self.device)

    @property
    def first_replicas(self) -> int:
        """The replicas that are made at once."""
        return self.replicas or 1

    def most_workers(self, net_type: str) -> int:
        """As many workers as have work: one worker does each run of a simple net."""
        cores = processor.available_cores()
        return min(cores, self.first_replicas) if net_type == "simple" else cores


DEFAULT_RUN_OPTIONS = RunOptions()
"""For a net that is made without options."""
