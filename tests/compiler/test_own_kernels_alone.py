"""Networks without oneDNN: what NumPy computes of them beside our own kernels, which is to be nothing that is heavy."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dagexec.ops.engines.onednn.binding import own_kernels
from tests.compiler.family_nets import NETS
from tests.compiler.test_compiled_nets import LARGER, LARGEST_ERROR, SIZES

ROOT = Path(__file__).parents[2]
MOVING = {"Flatten", "Reshape", "ExpandDims", "Squeeze"}
"""Operators that compute nothing, and copy nothing or as fast by NumPy."""

SIZES_OF_TEXTS = {"EQ", "GT", "Or", "Range", "Shape"}
"""Operators on sizes and places, of some integers and booleans."""


def reports(*names: str, **environment: str) -> dict[str, Any]:
    """What a process without oneDNN tells of networks."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.compiler.numpy_operators", *names],
        env={**os.environ, "DAGEXEC_ONEDNN": "off", "DAGEXEC_CHOICES": "off"} | environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.slow
@pytest.mark.skipif(own_kernels() is None, reason="no kernels run here")
def test_numpy_computes_nothing_that_is_heavy() -> None:
    for name, report in reports(*SIZES, *LARGER, *NETS).items():
        assert report["reasons"] == [], name
        assert set(report["plain"]) <= MOVING | SIZES_OF_TEXTS, name
        assert report["error"] < LARGEST_ERROR, name


@pytest.mark.slow
def test_without_kernels_of_our_own_numpy_computes_all() -> None:
    [report] = reports("lenet", DAGEXEC_OWN_KERNELS="off").values()
    assert {"FusedFC", "MaxPool", "Softmax"} <= set(report["plain"])
    assert report["error"] < LARGEST_ERROR
