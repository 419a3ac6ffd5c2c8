"""Tasks of chains: what is worth sharing where chains alone keep workers busy."""

from __future__ import annotations

import pytest

from dagexec.core.native import NativeCall, NativeStep, can_run
from dagexec.scheduler.run.work import SingleChain, pieces_of_chains

pytestmark = pytest.mark.skipif(not can_run(), reason="no machine code runs here")


@pytest.mark.parametrize(("shortest", "pieces"), [(0.0, [2, 2]), (40e-6, [1, 2])])
def test_a_phase_that_is_too_short_to_be_shared_is_one_piece_of_all_its_calls(
    shortest: float, pieces: list[int]
) -> None:
    calls = [NativeCall(1, (number, 0, 0, 0), None, RuntimeError, None) for number in range(4)]
    steps = tuple(NativeStep((((first,), (second,)),)) for first, second in (calls[:2], calls[2:]))
    work = pieces_of_chains(SingleChain(), [steps], [[30e-6, 50e-6]], [8], in_machine_code=False, shortest=shortest)
    assert list(work.graph.pieces) == pieces
    made = [call for task in work.steps for piece in task for step in piece for call in _calls(step)]
    assert made == calls


def _calls(step: object) -> list[NativeCall]:
    assert isinstance(step, NativeStep)
    return [call for phase in step.phases for piece in phase for call in piece]
