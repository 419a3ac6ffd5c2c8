"""The examples that `dagexec train` knows: networks of the zoo on real data that needs no download."""

from __future__ import annotations

import difflib
from collections.abc import Callable

from dagexec.errors import ModelFormatError
from dagexec.training.task import TrainingTask
from dagexec.zoo.tasks import digits, text

_TASKS: dict[str, Callable[[int], TrainingTask]] = {
    "char_lstm": text.char_lstm,
    "lenet_digits": digits.lenet,
    "resnet20_digits": digits.resnet20,
}

__all__ = ["make", "names"]


def names() -> list[str]:
    """The tasks `make` knows, sorted."""
    return sorted(_TASKS)


def make(name: str, seed: int = 0) -> TrainingTask:
    """The task `name`; `seed` decides which samples are held out.

    Raises ModelFormatError, suggesting close names, when there is none, and DataError without scikit-learn.
    """
    found = _TASKS.get(name)
    if found is None:
        close = difflib.get_close_matches(name, _TASKS, n=3)
        hint = f"did you mean {' or '.join(close)}?" if close else f"known: {', '.join(names())}"
        raise ModelFormatError(f"there is no task {name!r}; {hint}")
    return found(seed)
