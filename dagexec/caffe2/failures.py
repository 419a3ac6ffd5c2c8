"""Errors as Caffe2 raises them: what fails in its workspaces is a RuntimeError, which scripts catch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from dagexec.errors import Caffe2Error, DagexecError


@contextmanager
def failing_as_caffe2(doing: str) -> Iterator[None]:
    """Have what dagexec raises inside be a Caffe2Error, whose message begins with `doing`; the error is its cause."""
    try:
        yield
    except Caffe2Error:
        raise
    except DagexecError as error:
        raise Caffe2Error(f"{doing}: {error}") from error
