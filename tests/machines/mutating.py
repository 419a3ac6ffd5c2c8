"""Small mistakes put into a machine while it is looked at."""

from __future__ import annotations

import inspect
import textwrap
from typing import Any, NamedTuple

import pytest


class Mistake(NamedTuple):
    """In the source of the method `name` of `owner` stands `after` in place of `before`, which is there once."""

    owner: type
    name: str
    before: str
    after: str

    def make(self, patch: pytest.MonkeyPatch) -> None:
        """Until the test is over."""
        found = inspect.getattr_static(self.owner, self.name)
        function = found.fget if isinstance(found, property) else getattr(found, "__func__", found)
        source = textwrap.dedent(inspect.getsource(function))
        assert source.count(self.before) == 1, f"{self.before!r} is not once in {self.name}"
        names: dict[str, Any] = dict(function.__globals__)
        exec("from __future__ import annotations\n" + source.replace(self.before, self.after), names)
        patch.setattr(self.owner, self.name, names[self.name])

    def __str__(self) -> str:
        return f"{self.owner.__name__}.{self.name}: {self.before.strip()[:30]}"
