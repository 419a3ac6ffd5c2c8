"""Current: a class of which objects are open in a thread, the innermost being the current one."""

from __future__ import annotations

import threading
from typing import Any, ClassVar

from dagexec.errors import Caffe2Error


class _Stack(threading.local):
    def __init__(self) -> None:
        self.entered: list[Any] = []


class Current:
    """Base of what `with` opens; `current` gives the innermost.

    Attributes:
        is_made_when_asked: where none is open, `current` makes one, for this call alone.
    """

    _stack: ClassVar[_Stack]
    is_made_when_asked: ClassVar[bool] = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Each class has a stack of its own."""
        super().__init_subclass__(**kwargs)
        cls._stack = _Stack()

    def __enter__(self) -> Any:
        self._stack.entered.append(self)
        return self

    def __exit__(self, *_error: object) -> None:
        self._stack.entered.pop()

    @classmethod
    def current(cls, value: Any = None, required: bool = True) -> Any:
        """`value` if there is one, else the innermost that is open. Raises Caffe2Error where none is, if `required`."""
        if value is not None:
            return value
        if cls._stack.entered:
            return cls._stack.entered[-1]
        if cls.is_made_when_asked:
            return cls()
        if required:
            raise Caffe2Error(f"no {cls.__name__} is open here")
        return None
