"""Sequences of requests, as clients of Triton send them: each has a session, which keeps what a request leaves behind.

A request says by parameters to which sequence it belongs (`sequence_id`), and whether it is the first or the last one
(`sequence_start`, `sequence_end`). Requests of one sequence run one at a time, in the order in which they came; those
of others run meanwhile.

A request that fails leaves its sequence as it was, but for a first one, after which there is none. A client that gives
a request up ends the sequence: it cannot know whether the request has run, nor can those that follow.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping

import anyio

from dagexec.core.feeds import Array, Feeds
from dagexec.executor.sessions.session import Session
from dagexec.platform.records import dataclass
from dagexec.server.config import SequenceConfig
from dagexec.server.inference import Parameter, RequestError

Identity = int | str

_ID_BYTES = 128
"""Of an identity that is a text."""


@dataclass(frozen=True, slots=True)
class Place:
    """Which sequence a request belongs to, and whether it begins and ends it."""

    identity: Identity
    is_first: bool
    is_last: bool


def place_of(parameters: Mapping[str, Parameter]) -> Place | None:
    """What parameters say; None for a request of no sequence, with `sequence_id` 0, "" or none. Raises RequestError."""
    identity = parameters.get("sequence_id", 0)
    if isinstance(identity, bool) or not isinstance(identity, Identity) or len(f"{identity}".encode()) > _ID_BYTES:
        raise RequestError(
            400,
            f"parameter 'sequence_id' must be a whole number or a text of at most {_ID_BYTES} bytes, "
            f"not {identity!r:.80}",
        )
    is_first, is_last = (_flag(parameters, name) for name in ("sequence_start", "sequence_end"))
    if identity:
        return Place(identity, is_first, is_last)
    if is_first or is_last:
        raise RequestError(400, "sequence_start and sequence_end need a sequence_id, other than 0 and ''")
    return None


def _flag(parameters: Mapping[str, Parameter], name: str) -> bool:
    value = parameters.get(name, False)
    if not isinstance(value, bool):
        raise RequestError(400, f"parameter {name!r} must be true or false, not {value!r:.80}")
    return value


class _Sequence:
    """One that is open, or has requests. These are numbered, over all sequences.

    Attributes:
        session: None where it is not open.
        began: the number of the request that it was opened by.
        given_up: the number of the latest request that its client gave up.
        requests: how many run or wait.
        turn: of the one that runs.
    """

    __slots__ = ("began", "given_up", "requests", "session", "turn")

    def __init__(self) -> None:
        self.session: Session | None = None
        self.began = self.given_up = self.requests = 0
        self.turn = anyio.Lock(fast_acquire=True)

    def end(self) -> None:
        """Let go of the session, which does not run."""
        session, self.session = self.session, None
        if session is not None:
            session.close()


class Sequences:
    """Those of one version of a model, on one event loop.

    Attributes:
        expired: how many ended because they were idle.
    """

    def __init__(
        self,
        model: str,
        config: SequenceConfig,
        open_session: Callable[[], Session] | None,
        clock: Callable[[], float],
    ) -> None:
        """`open_session` is None for a model that keeps nothing between requests."""
        self._model = model
        self._config = config
        self._open_session = open_session
        self._clock = clock
        self._numbers = itertools.count(1)
        self._sequences: dict[Identity, _Sequence] = {}
        self._idle: dict[Identity, float] = {}
        """Those without a request, and since when: the longest first."""
        self._closed = False
        self.expired = 0

    @property
    def open(self) -> int:
        """How many there are."""
        return len(self._sequences)

    @property
    def nbytes(self) -> int:
        """Bytes of what they keep."""
        return sum(one.session.nbytes for one in self._sequences.values() if one.session is not None)

    async def run(
        self,
        place: Place,
        feeds: Feeds,
        *,
        outputs: Iterable[str] | None = None,
        timeout: float | None = None,
        priority: int = 0,
    ) -> dict[str, Array]:
        """Run the model with the states of a sequence. The other arguments are those of `Session.run_async`.

        The wait for requests before it is part of `timeout`. Raises RequestError: 400 for a sequence that is not open,
        503 where there are too many sequences, or requests of this one, 504 when the timeout is over.
        """
        number = next(self._numbers)
        sequence = self._enter(place)
        try:
            with anyio.move_on_after(timeout) as patience:
                await sequence.turn.acquire()
            if patience.cancelled_caught:
                raise RequestError(504, f"{self._label(place)}: the requests before this one took {timeout} seconds")
            left = None if timeout is None else max(0.0, patience.deadline - anyio.current_time())
            try:
                session = self._session(place, sequence, number)
                results = await session.run_async(feeds, outputs=outputs, timeout=left, priority=priority)
                if place.is_last:
                    sequence.end()
                return results
            except Exception:
                if place.is_first:
                    sequence.end()
                raise
            finally:
                sequence.turn.release()
        except anyio.get_cancelled_exc_class():
            sequence.given_up = max(sequence.given_up, number)
            raise
        finally:
            self._leave(place.identity, sequence)

    def expire(self) -> None:
        """End those that have been idle for too long."""
        latest = self._clock() - self._config.idle_seconds
        while self._idle:
            identity, since = next(iter(self._idle.items()))
            if since > latest:
                return
            self._end_idle(identity)
            self.expired += 1

    def close(self) -> None:
        """End all of them, those that have requests after the last of these. No other requests come."""
        self._closed = True
        for identity in list(self._idle):
            self._end_idle(identity)

    def _label(self, place: Place) -> str:
        return f"model {self._model!r}: sequence {place.identity!r:.80}"

    def _enter(self, place: Place) -> _Sequence:
        """That of a request that came. Raises RequestError."""
        if self._open_session is None:
            raise RequestError(400, f"model {self._model!r} has no sequences: it keeps nothing between requests")
        self.expire()
        sequence = self._sequences.get(place.identity)
        if sequence is None:
            if not place.is_first:
                raise self._not_open(place)
            if len(self._sequences) >= self._config.max_open:
                raise RequestError(503, f"model {self._model!r}: {self._config.max_open} sequences are open", 1)
            sequence = self._sequences[place.identity] = _Sequence()
        elif sequence.requests > self._config.max_queued:
            raise RequestError(503, f"{self._label(place)} has {self._config.max_queued} requests that wait", 1)
        self._idle.pop(place.identity, None)
        sequence.requests += 1
        return sequence

    def _leave(self, identity: Identity, sequence: _Sequence) -> None:
        """A request of it is over."""
        sequence.requests -= 1
        if sequence.requests:
            return
        if self._closed or sequence.began <= sequence.given_up:
            sequence.end()
        if sequence.session is None:
            del self._sequences[identity]
        else:
            self._idle[identity] = self._clock()

    def _session(self, place: Place, sequence: _Sequence, number: int) -> Session:
        """That of the request whose turn it is. A first one begins anew, whatever there was before."""
        if place.is_first:
            sequence.end()
            assert self._open_session is not None
            sequence.session, sequence.began = self._open_session(), number
        elif sequence.session is None or sequence.began <= sequence.given_up < number:
            raise self._not_open(place)
        return sequence.session

    def _not_open(self, place: Place) -> RequestError:
        return RequestError(
            400,
            f"{self._label(place)} is not open: the first request of a sequence has sequence_start, and one ends that "
            f"is idle for {self._config.idle_seconds:g} seconds, or whose client gives up a request",
        )

    def _end_idle(self, identity: Identity) -> None:
        del self._idle[identity]
        self._sequences.pop(identity).end()
