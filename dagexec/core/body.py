"""Operators that run nets: `If`, `Loop`, `Scan`. A net in an argument of such an operator is a body.

A body has a workspace of its own, without a parent, so that none of its names can mean a blob outside by accident. Its
`external_input` names first the values that the operator hands it in each execution, then what it captures: those are
the last inputs of the operator, so that dependencies, memory plan and proof of the outer net know of them. Inside they
have the names in argument `captured`, whatever they are called outside. The body reads the very tensors, and may not
write them. `external_output` names what an execution results in.

How a body runs is the scheduler's business: it registers the net type `body` (`dagexec.scheduler.nets.body`). The base
of the operators is `dagexec.core.operator_with_bodies`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from dagexec.core.blob import Blob
from dagexec.core.schema import TensorType
from dagexec.platform.records import dataclass

NET_TYPE = "body"


class Body(Protocol):
    """A net that an operator runs, any number of times, on the current contents of the body's inputs."""

    @property
    def name(self) -> str:
        """The net's name."""

    def prepare(self) -> None:
        """Have the outputs of known types sized for the inputs, as the next execution would."""

    def __call__(self) -> None:
        """Execute once. Raises OperatorError, and RunCancelledError or RunTimeoutError between operators."""

    def close(self) -> None:
        """Release threads and memory."""

    def infer(self, known: Mapping[int, TensorType], results: Sequence[Blob]) -> InferredBody | None:
        """The types of `results` when blobs, by their ids, have the types `known`; None where only a run can tell."""

    def settle(self) -> SettledBody:
        """Prepare for the shapes that blobs have now, where `infer` found that nothing else matters."""


InferredBody = tuple[tuple[TensorType, ...], float]
"""The types of results, and the seconds that an execution is estimated to take."""


@dataclass(frozen=True)
class SettledBody:
    """A body prepared for shapes that stay.

    Attributes:
        execute: executes it once.
        parts: its steps, to be called in sequence instead; empty where it executes chains concurrently.
        name_part: the name of a step in errors.
        blobs: those that it writes; they must hold their present objects when it is executed.
        nbytes: an estimate of its memory.
        in_place: whether all blobs hold the objects that they held, after those of `blobs` were restored.
    """

    execute: Callable[[], object]
    parts: tuple[Callable[[], object], ...]
    name_part: Callable[[Callable[[], object]], str]
    blobs: tuple[Blob, ...]
    nbytes: int
    in_place: Callable[[], bool]
