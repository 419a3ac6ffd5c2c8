"""What operators with engine CUDNN share: handles, plans, workspaces, and the way back to the default engine."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING

from dagexec.core.exclusive import library_state
from dagexec.core.node import Node, operator_label
from dagexec.core.operator import Step
from dagexec.devices.cuda.arrays import address
from dagexec.devices.cuda.cudnn_graph import (
    DATA_GRADIENT,
    FILTER,
    FILTER_GRADIENT,
    FORWARD,
    ConvGraph,
    ConvParameters,
    TensorLayout,
    X,
    Y,
    aligned,
    element_type,
)
from dagexec.devices.cuda.cudnn_handle import require_cudnn, thread_handles
from dagexec.devices.cuda.cudnn_plans import PlanOptions, plan_cache
from dagexec.devices.cuda.runtime import cuda_runtime
from dagexec.errors import UnsupportedFeatureError
from dagexec.ops.base.geometry import Axis
from dagexec.ops.engines.cuda.conv.operators import CudaConvOperator
from dagexec.ops.engines.cuda.cudnn.steps import WORKSPACE_ALIGNMENT, InlineStep, StateStep
from dagexec.ops.families.conv.problem import DEFAULT_LIMIT, Array, ConvProblem

if TYPE_CHECKING:
    from dagexec.core.workspace import Workspace

logger = logging.getLogger("dagexec")

_SPATIAL_AXES = (2, 3)


class CudnnConvOperator(CudaConvOperator):
    """An operator of the convolution family. Each of its products goes to cuDNN, or else to the default engine.

    cuDNN works on the operator's own stream, with the calling thread's handle and a workspace from the memory plan; or,
    with argument `cudnn_state`, with the handle, stream and workspace of that library state of the device, which it
    shares with others. `cudnn_inline` says so itself, when both are requested.
    """

    def __init__(self, definition: Node, workspace: Workspace, *, index: int = -1, net: str = "") -> None:
        """Raises UnsupportedFeatureError where there is no cuDNN that serves."""
        try:
            require_cudnn(operator_label(definition, index, net))
        except UnsupportedFeatureError as reason:
            _say_once(str(reason.__cause__))
            raise
        super().__init__(definition, workspace, index=index, net=net)
        self._runtime = cuda_runtime(self.runtime.device)
        if not self.arguments.bool("cudnn_inline", "cudnn_state" not in self.arguments):
            self.library_state = library_state(self.runtime.device, self.arguments.int("cudnn_state", 0))

    @property
    def plan_options(self) -> PlanOptions:
        """What the arguments allow an engine to do."""
        return PlanOptions(
            limit=self.arguments.int("ws_nbytes_limit", DEFAULT_LIMIT),
            deterministic=self.arguments.bool("deterministic"),
            allow_tf32=self.arguments.bool("allow_tf32"),
            reduced_sums=self.arguments.bool("float16_compute"),
            exhaustive=self.arguments.bool("exhaustive_search"),
        )

    def output_of(self, problem: ConvProblem) -> Step:
        return self._product(FORWARD, problem) or super().output_of(problem)

    def input_of(self, problem: ConvProblem) -> Step:
        return self._product(DATA_GRADIENT, problem) or super().input_of(problem)

    def filter_of(self, problem: ConvProblem) -> Step:
        return self._product(FILTER_GRADIENT, problem) or super().filter_of(problem)

    def _product(self, operation: str, problem: ConvProblem) -> Step | None:
        """cuDNN's step; None, with a line in the log, where the default engine has to serve."""
        try:
            graph = self.graph(operation, problem)
            return self.planned_step(graph, {X: problem.x, FILTER: problem.weights, Y: problem.y})
        except UnsupportedFeatureError as reason:
            logger.info("%s: the default engine computes it: %s", self.label, reason)
            return None

    def graph(
        self,
        operation: str,
        problem: ConvProblem,
        *,
        bias: bool = False,
        residual: Array | None = None,
        relu: bool = False,
    ) -> ConvGraph:
        """The graph of a convolution. Raises UnsupportedFeatureError for what cuDNN is not asked."""
        dtype = element_type(problem.x.dtype)
        if dtype is None:
            raise UnsupportedFeatureError(f"{self.label}: cuDNN is not used for {problem.x.dtype}")
        if not (problem.x.size and problem.y.size and problem.weights.size):
            raise UnsupportedFeatureError(f"{self.label}: a tensor has no elements")
        if len(problem.axes) not in (1, *_SPATIAL_AXES):
            raise UnsupportedFeatureError(f"{self.label}: cuDNN does not support {len(problem.axes)} spatial axes")
        last = problem.channels_last
        return ConvGraph(
            operation,
            dtype,
            TensorLayout.of(problem.x, channels_last=last),
            TensorLayout.of(problem.weights, channels_last=last),
            TensorLayout.of(problem.y, channels_last=last),
            windows_of(problem.axes, self.label),
            bias,
            None if residual is None else TensorLayout.of(residual, channels_last=last),
            relu,
        )

    def planned_step(self, graph: ConvGraph, arrays: Mapping[int, Array]) -> Step:
        """The step that computes `graph` on these arrays. Raises UnsupportedFeatureError where cuDNN has no engine."""
        if not aligned([address(array) for array in arrays.values()]):
            raise UnsupportedFeatureError(f"{self.label}: a tensor does not start at a multiple of 16 bytes")
        plan = plan_cache(self._runtime).get(graph, self.plan_options)
        if self.library_state is not None:
            self.library_state.reserve(plan.workspace_nbytes)
            return StateStep(plan, arrays, self.library_state)
        nbytes = plan.workspace_nbytes
        memory = self.working_memory(nbytes + WORKSPACE_ALIGNMENT) if nbytes else None
        return InlineStep(plan, arrays, memory, thread_handles(self._runtime))


@cache
def _say_once(reason: str) -> None:
    """Warn that engine CUDNN is requested in vain."""
    logger.warning("engine CUDNN is not used: %s", reason)


def windows_of(axes: Sequence[Axis], label: str) -> ConvParameters:
    """The windows of a convolution as cuDNN describes them; one spatial axis becomes two.

    The padding behind is what leads to as many windows: as much as before if that does, which more engines take.
    Raises UnsupportedFeatureError for padding that cuts pixels off.
    """
    behind = [_behind(axis, label) for axis in axes]
    missing = max(0, _SPATIAL_AXES[0] - len(axes))
    zeros, ones = (0,) * missing, (1,) * missing
    return ConvParameters(
        (*zeros, *(axis.head for axis in axes)),
        (*zeros, *behind),
        (*ones, *(axis.stride for axis in axes)),
        (*ones, *(axis.dilation for axis in axes)),
    )


def _behind(axis: Axis, label: str) -> int:
    """Pixels of padding behind an axis."""
    for tail in (axis.head, max(0, axis.covered - axis.head - axis.size)):
        room = axis.size + axis.head + tail - axis.extent
        if axis.head >= 0 and tail >= 0 and room >= 0 and room // axis.stride + 1 == axis.out:
            return tail
    raise UnsupportedFeatureError(
        f"{label}: cuDNN does not support such padding: {axis.head} before, {axis.tail} after"
    )
