"""PythonStep: a function of the application that an operator of a net calls.

A net is a message and cannot hold a function, so the operator has a token in its place that nobody can guess: a model
from a file cannot name a function of this process. The Model holds the step itself (`Model.python_steps`), and so does
every operator made of it; a step that nobody holds is forgotten.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any
from weakref import WeakValueDictionary

from dagexec.errors import AccessError


class PythonStep:
    """A function, and the token by which operators find it; behind a pickle it has the same one.

    Attributes:
        function: takes the arrays of the inputs, and gives those of the outputs.
        token: what stands for it in a net.
    """

    __slots__ = ("__weakref__", "function", "token")

    def __init__(self, function: Callable[..., Any], token: str | None = None) -> None:
        self.function = function
        self.token = token or os.urandom(16).hex()
        _steps[self.token] = self

    def __reduce__(self) -> tuple[type[PythonStep], tuple[Callable[..., Any], str]]:
        return PythonStep, (self.function, self.token)


_steps: WeakValueDictionary[str, PythonStep] = WeakValueDictionary()


def step_of(token: str, label: str) -> PythonStep:
    """The step of a token. Raises AccessError, naming `label`, where this process has none."""
    found = _steps.get(token)
    if found is None:
        raise AccessError(f"{label}: its function is not known here: a pipeline brings it, and no model file can")
    return found
