"""The table of plans in docs/memory.md, made anew: models as they are written, NumPy's operators, batch 1."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from dagexec import zoo
from dagexec.analysis.memory import planned
from dagexec.core.arguments import make_argument

PAGE = Path(__file__).parents[3] / "docs" / "memory.md"
ROWS = re.findall(r"^\| (\w+) \| ([\d. |]+) \|$", PAGE.read_text(), re.MULTILINE)


def megabytes(number: int) -> str:
    return f"{number / 1e6:.2f}"


def found_for(name: str) -> list[str]:
    """Without sharing; peak and bound for `simple`, then for `dag`."""
    model = zoo.build(name, 1)
    for definition in model.net.op:
        if definition.type == "Concat":
            definition.arg.append(make_argument("zero_copy", 1))
    feeds = {key: np.zeros([size or 1 for size in info.shape or ()], np.float32) for key, info in model.inputs.items()}
    row: list[str] = []
    for net_type in ("simple", "dag"):
        with planned(model, net_type, feeds) as preparation:
            memory = preparation.memory
            assert memory is not None
            assert memory.working_bytes == memory.own_bytes == 0
            assert memory.lower_bound is not None
            row += [] if row else [megabytes(memory.unshared_bytes)]
            row += [megabytes(memory.peak_bytes), megabytes(memory.lower_bound)]
    return row


@pytest.mark.parametrize(
    ("name", "shown"), [pytest.param(*row, marks=[] if row[0] == "lenet" else pytest.mark.slow) for row in ROWS]
)
def test_plans_are_as_small_as_the_page_says(name: str, shown: str) -> None:
    assert found_for(name) == shown.split(" | ")


def test_the_page_has_every_architecture_for_images() -> None:
    assert len(ROWS) == 10
