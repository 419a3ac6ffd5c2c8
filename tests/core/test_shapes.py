"""Shapes: the number of elements, and sizes that no array can have."""

import pytest

from dagexec.core.shapes import element_count
from dagexec.errors import ResourceError


def test_element_count_refuses_what_no_array_can_have() -> None:
    assert element_count(()) == 1
    assert element_count((3, 0, 2)) == 0
    assert element_count((2**31, 2**31)) == 2**62
    for shape, message in (((2**32, 2**31), "overflows"), ((2**62, 0, 4), "overflows"), ((0, -1), "negative size")):
        with pytest.raises(ResourceError, match=message):
            element_count(shape)
