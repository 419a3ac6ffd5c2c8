"""TestCase: a test that begins with an empty workspace."""

from __future__ import annotations

import unittest

import numpy as np

from dagexec.caffe2 import workspace

__all__ = ["TestCase", "rand_array"]


class TestCase(unittest.TestCase):
    """Resets the current workspace before each test and behind all of them."""

    def setUp(self) -> None:
        workspace.ResetWorkspace()

    @classmethod
    def tearDownClass(cls) -> None:
        workspace.ResetWorkspace()


def rand_array(*dims: int) -> np.ndarray:
    """Numbers from -0.5 to 0.5."""
    return np.random.rand(*dims) - 0.5
