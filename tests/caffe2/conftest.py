"""Each test begins with an empty workspace, the only one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dagexec.caffe2 import workspace


@pytest.fixture(autouse=True)
def _empty_workspace() -> Iterator[None]:
    workspace.SwitchWorkspace("default")
    workspace.ResetWorkspace()
    yield
    workspace.SwitchWorkspace("default")
    workspace.ResetWorkspace()
