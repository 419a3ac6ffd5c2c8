"""`dagexec.testing.check_gradient`, which now and then runs the gradient operators on CUDA, too."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from dagexec import OperatorDef, Workspace, testing
from tests.ops.running import check_on_cuda, is_turn_of_cuda


def _on_cuda_by_turns(definitions: Sequence[OperatorDef], workspace: Workspace) -> None:
    """Run on CUDA, on what the run has left in the blobs, each operator of which all inputs are still there."""
    if len(definitions) == 1 or not is_turn_of_cuda():
        return
    for number, one in enumerate(definitions):
        overwritten = {name for later in definitions[number:] for name in later.output}
        if not overwritten & set(one.input):
            arrays = {name: workspace.fetch_blob(name).copy() for name in one.input}
            check_on_cuda(one, arrays, [workspace.fetch_blob(name).copy() for name in one.output])


check_gradient = partial(testing.check_gradient, also=_on_cuda_by_turns)
analytic_gradients = partial(testing.analytic_gradients, also=_on_cuda_by_turns)
