"""What clients ask for and are answered, whatever the transport: HTTP and gRPC translate to and from these.

The words are those of the Open Inference Protocol, version 2.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import field
from typing import Literal

from dagexec.core.feeds import Array
from dagexec.errors import (
    ClosedError,
    DagexecError,
    FeedError,
    QueueFullError,
    ResourceError,
    RunCancelledError,
    RunTimeoutError,
    ShapeError,
    WorkerLostError,
)
from dagexec.platform.records import dataclass

logger = logging.getLogger("dagexec.server")

Parameter = str | int | float | bool


@dataclass(frozen=True, slots=True, kw_only=True)
class InferenceRequest:
    """One request to run a model.

    Attributes:
        model: its name.
        version: one of its versions; None for the current one.
        id: is answered as it is.
        inputs: arrays by name. They may share memory with what was received, and be read-only.
        outputs: names of the results asked for; none for all.
        parameters: as Triton has them (`Repository.infer`, `Repository.generate`); others are ignored.
    """

    model: str
    version: str | None = None
    id: str = ""
    inputs: dict[str, Array]
    outputs: tuple[str, ...] = ()
    parameters: Mapping[str, Parameter] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class InferenceResponse:
    """The results of a request: contiguous arrays by name, in the order asked for."""

    model: str
    version: str
    id: str
    outputs: dict[str, Array]


FinishReason = Literal["", "stop", "length"]
"""Why a token is the last one: it is among those that end a text, or there are as many as were asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratedToken:
    """One of the tokens that a request gets, with the reason why it is the last one; "" for others."""

    model: str
    version: str
    id: str
    token: int
    finish_reason: FinishReason


@dataclass(frozen=True, slots=True)
class TensorMetadata:
    """An input or output of a model: name, type as the protocol calls it, and sizes, -1 for one that is free.

    `shape` is None where not even the number of axes is known.
    """

    name: str
    datatype: str
    shape: tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class ModelMetadata:
    """What a model is called, which versions of it can be asked for, and what it takes and gives."""

    name: str
    versions: tuple[str, ...]
    platform: str
    inputs: tuple[TensorMetadata, ...]
    outputs: tuple[TensorMetadata, ...]


class RequestError(Exception):
    """A request that gets no result.

    Attributes:
        status: the status of HTTP that says whose fault it is.
        retry_after: whole seconds after which trying again may help, None where it will not.
    """

    def __init__(self, status: int, message: str, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after = retry_after


_STATUSES: tuple[tuple[type[DagexecError], int], ...] = (
    (FeedError, 400),
    (ShapeError, 400),
    (ResourceError, 413),
    (QueueFullError, 503),
    (ClosedError, 503),
    (RunCancelledError, 503),
    (WorkerLostError, 503),
    (RunTimeoutError, 504),
)


def request_error(error: Exception, retry_after: int = 1) -> RequestError:
    """What a client is told of an error in a run.

    Errors of dagexec are told as they are. Of any other, which is a defect, the client learns nothing. Failures are
    logged, and mistakes of clients are not: these could fill a disk.
    `retry_after` is for those that pass.
    """
    if isinstance(error, RequestError):
        return error
    if not isinstance(error, DagexecError):
        logger.error("a request failed unexpectedly", exc_info=error)
        return RequestError(500, "internal error")
    status = next((status for kind, status in _STATUSES if isinstance(error, kind)), 500)
    if status == 500:
        logger.error("a request failed: %s", str(error))
    return RequestError(status, str(error), retry_after if status == 503 else None)
