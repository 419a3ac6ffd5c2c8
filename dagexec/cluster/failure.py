"""Errors on their way from one process to another.

A pickled exception loses its cause, and one whose constructor takes more than a message cannot be made again.
"""

from __future__ import annotations

import pickle
from itertools import pairwise

from dagexec.errors import DagexecError
from dagexec.platform.records import dataclass

_MAX_CAUSES = 8


@dataclass(frozen=True)
class Failure:
    """An error as bytes: itself and its causes, each after what it caused; and its text where that fails."""

    pickled: tuple[bytes, ...]
    text: str
    notes: tuple[str, ...]

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """What `error` is elsewhere."""
        chain: list[bytes] = []
        one: BaseException | None = error
        while one is not None and len(chain) < _MAX_CAUSES:
            pickled = _pickled(one)
            if pickled is None:
                break
            chain.append(pickled)
            one = one.__cause__
        return cls(tuple(chain), f"{type(error).__name__}: {error}", tuple(getattr(error, "__notes__", ())))

    def error(self) -> DagexecError:
        """The error, with its causes. What is no DagexecError, or cannot be made here, becomes one with its text."""
        found: list[BaseException] = []
        for pickled in self.pickled:
            try:
                found.append(pickle.loads(pickled))
            except Exception:
                break
        for one, cause in pairwise(found):
            one.__cause__ = cause
        if found and isinstance(found[0], DagexecError):
            return found[0]
        error = DagexecError(self.text)
        for note in self.notes:
            error.add_note(note)
        error.__cause__ = found[0] if found else None
        return error


def _pickled(error: BaseException) -> bytes | None:
    """The error as bytes; None when it could not be made of them again."""
    try:
        pickled = pickle.dumps(error)
        again = pickle.loads(pickled)
    except Exception:
        return None
    return pickled if type(again) is type(error) and str(again) == str(error) else None
