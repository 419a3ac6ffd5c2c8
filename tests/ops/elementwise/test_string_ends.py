"""Ends of strings and rows as strings."""

from __future__ import annotations

import numpy as np
import pytest

from dagexec.errors import ArgumentError
from tests.ops.running import run_operator

STRINGS = np.array([[b"dagexec", b"da"], [b"", b"xec"]], object)


@pytest.mark.parametrize(
    ("name", "arguments", "expected"),
    [
        ("StringPrefix", {}, [[b"dag", b"da"], [b"", b"xec"]]),
        ("StringSuffix", {"length": 2}, [[b"ec", b"da"], [b"", b"ec"]]),
        ("StringSuffix", {"length": 0}, [[b"", b""], [b"", b""]]),
        ("StringStartsWith", {"prefix": "dag"}, [[True, False], [False, False]]),
        ("StringEndsWith", {"suffix": "xec"}, [[True, False], [False, True]]),
        ("StringEquals", {"text": "da"}, [[False, True], [False, False]]),
        ("StringJoin", {"delimiter": "-"}, [b"dagexec-da-", b"-xec-"]),
        ("StringJoin", {"axis": 1}, [b"dagexec,,", b"da,xec,"]),
    ],
)
def test_parts_of_strings(name: str, arguments: dict[str, str], expected: list[object]) -> None:
    assert run_operator(name, [STRINGS], **arguments)[0].tolist() == expected


def test_numbers_are_joined_and_a_negative_length_is_refused() -> None:
    assert run_operator("StringJoin", [np.array([3.9, 1e7, 2], np.float32)])[0].tolist() == [b"3.9,", b"1e+07,", b"2,"]
    assert run_operator("StringJoin", [np.array([[1, -2]])])[0].tolist() == [b"1,-2,"]
    with pytest.raises(ArgumentError, match="at least 0, found -1"):
        run_operator("StringPrefix", [STRINGS], length=-1)
