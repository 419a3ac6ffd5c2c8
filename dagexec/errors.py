"""Every error dagexec raises on purpose. A message names the net, the operator, the blob, what was expected and found.

All of them are `DagexecError`s, so an embedding application needs one `except`. The children say whose fault it is:
the model's (`ModelFormatError`, `SchemaError`, ...), the caller's (`FeedError`), or the run's (`OperatorError`, ...).
"""

from __future__ import annotations

__all__ = [
    "AccessError",
    "ArgumentError",
    "AssertionFailedError",
    "BlobTypeError",
    "Caffe2Error",
    "ClosedError",
    "CommunicationError",
    "ConformanceError",
    "CycleError",
    "DagexecError",
    "DataError",
    "DeadlineExceededError",
    "DeadlockError",
    "DeviceError",
    "FeedError",
    "GradientError",
    "HazardError",
    "MissingBlobError",
    "ModelFormatError",
    "NetOrderError",
    "NonFiniteError",
    "OperatorError",
    "OutputError",
    "PlanError",
    "PolicyError",
    "QueueClosedError",
    "QueueFullError",
    "QueueTimeoutError",
    "ReplicaError",
    "ResourceError",
    "RowsError",
    "RunCancelledError",
    "RunTimeoutError",
    "SchemaError",
    "SessionBusyError",
    "SettingError",
    "ShapeError",
    "StorageError",
    "UnsupportedFeatureError",
    "UnsupportedOperatorError",
    "WorkerLostError",
]


class DagexecError(Exception):
    """Base of every error that dagexec raises on purpose."""


class ModelFormatError(DagexecError):
    """A model file is truncated, malformed, or refers to data it may not read."""


class SchemaError(DagexecError):
    """An OperatorDef breaks its operator's schema: wrong arity, forbidden in-place pair, missing or bad argument."""


class ArgumentError(SchemaError):
    """An operator argument is absent, of the wrong kind, or out of range."""


class ShapeError(DagexecError):
    """Shapes or dtypes of an operator's inputs do not fit together."""


class PipelineError(DagexecError):
    """The stages of a pipeline do not fit together. The message names pipeline, stage, input, expected and found."""


class RowsError(DagexecError):
    """A model's examples cannot be told apart along one axis: what is computed for one depends on others."""


class UnsupportedOperatorError(DagexecError):
    """No operator of this type (or no implementation for this device or feature) is registered."""


class UnsupportedFeatureError(UnsupportedOperatorError):
    """An engine does not serve this combination of arguments; the registry then tries the next engine."""


class MissingBlobError(DagexecError):
    """A blob that an operator or a caller asks for does not exist, or holds nothing yet."""


class BlobTypeError(DagexecError):
    """A blob holds an object of another type than requested."""


class Caffe2Error(DagexecError, RuntimeError):
    """A call of `dagexec.caffe2` failed, for which Caffe2 raises RuntimeError. The `__cause__` is why."""


class NetOrderError(DagexecError):
    """An operator reads a blob that only a later operator writes."""


class CycleError(NetOrderError):
    """The operators of a net depend on each other in a cycle.

    `operators` holds the cycle as operator labels, in order of dependency.
    """

    def __init__(self, message: str, operators: list[str]) -> None:
        super().__init__(message)
        self.operators = operators


class GradientError(DagexecError):
    """A gradient cannot be computed: an operator on the way has none, or a blob it needs was overwritten."""


class ResourceError(DagexecError):
    """A size overflows, or the tensors of a net would not fit in memory. Raised before anything is allocated."""


class DeviceError(DagexecError):
    """An unknown device, or a device that failed."""


class AccessError(DagexecError):
    """An operator would read or write files, or talk to other processes, where that is not allowed."""


class StorageError(DagexecError):
    """A database or a file of blobs is missing, damaged or cannot be written. The message names file and place."""


class OutputError(StorageError):
    """A file cannot be written: no room, no permission, no folder. What was there before stays; it is named."""


class QueueClosedError(DagexecError):
    """A blobs queue was closed, and for a reader it is empty, too. The `__cause__` is why, where that is an error."""


class QueueTimeoutError(DagexecError, TimeoutError):
    """A blobs queue stayed full, or empty, for as long as an operator was to wait."""


class DataError(DagexecError):
    """A batch of training data could not be read. The `__cause__` is what the reader raised."""


class SettingError(DagexecError, ValueError):
    """An option, or a variable of the environment, has a value that it cannot have."""


class FeedError(DagexecError):
    """An input given to a run is unknown, missing, or has the wrong dtype or shape."""


class OperatorError(DagexecError):
    """An operator raised while it ran. The original exception is the `__cause__`.

    Attributes: `net`, `operator` (its label: type, name and index), `worker` (thread name).
    """

    def __init__(self, message: str, *, net: str = "", operator: str = "", worker: str = "") -> None:
        super().__init__(message)
        self.net = net
        self.operator = operator
        self.worker = worker


class WorkerLostError(DagexecError):
    """A worker thread died in the middle of the run: something raised in it outside any operator (the `__cause__`)."""


class NonFiniteError(DagexecError):
    """A NaN or an infinity appeared where numbers are checked. `blob` holds it, `producer` names what computed it."""

    def __init__(self, message: str, *, blob: str, producer: str) -> None:
        super().__init__(message)
        self.blob = blob
        self.producer = producer


class AssertionFailedError(DagexecError):
    """What an Assert operator of the net asserts is not so in this run."""


class HazardError(DagexecError):
    """Accesses to one memory that nothing orders were found in a run. `races` describes each of them."""

    def __init__(self, message: str, races: tuple[str, ...]) -> None:
        super().__init__(message)
        self.races = races


class ConformanceError(DagexecError):
    """What threads did in a run is not what the machine of runs allows. `deviations` tells each with both stories."""

    def __init__(self, message: str, deviations: tuple[str, ...]) -> None:
        super().__init__(message)
        self.deviations = deviations


class PlanError(DagexecError):
    """A compiled model that no file of a plan can keep, or that cannot be had from one."""


class PolicyError(DagexecError):
    """A policy of scheduling decided what cannot be: a chain twice, one that is not ready, or never.

    Attributes: `policy` (its name), `net`, `chain` (its number; None where it is about no single one).
    """

    def __init__(self, message: str, *, policy: str = "", net: str = "", chain: int | None = None) -> None:
        super().__init__(message)
        self.policy = policy
        self.net = net
        self.chain = chain


class RunCancelledError(DagexecError):
    """The run was cancelled before it finished."""


class RunTimeoutError(DagexecError, TimeoutError):
    """The run did not finish within its timeout and was cancelled."""


class DeadlineExceededError(DagexecError, TimeoutError):
    """The time that was granted for something is over; what it was for is done without."""


class ClosedError(DagexecError):
    """The executor, pool or net has been closed."""


class CommunicationError(DagexecError):
    """Ranks that work together cannot go on: one of them failed, left, or does not answer.

    `rank` is the one to blame.
    """

    def __init__(self, message: str, *, rank: int) -> None:
        super().__init__(message)
        self.rank = rank


class ReplicaError(DagexecError):
    """A replica of a deployment did not start, or its process was lost while it ran a request. The message names it."""


class DeadlockError(DagexecError):
    """Under a controlled schedule, no thread could go on. The message says who waits for what, and who holds it."""


class QueueFullError(DagexecError):
    """An executor that rejects requests when its queue is full did so. Trying again later may help.

    Attributes: `limit` (requests that may be queued), `queued` and `running` (requests at that moment).
    """

    def __init__(self, message: str, *, limit: int = 0, queued: int = 0, running: int = 0) -> None:
        super().__init__(message)
        self.limit = limit
        self.queued = queued
        self.running = running


class SessionBusyError(DagexecError):
    """A session was asked for something while a run of it was under way."""
