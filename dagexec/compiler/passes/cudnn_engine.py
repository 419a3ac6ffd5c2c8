"""Pass `cudnn-engine`: on CUDA, operators that cuDNN can compute name its engine; where it is absent nothing changes.

Pass `cudnn-states`, done when it is requested, gives them the library states of the device, each with a stream, a
handle and a workspace (`core.exclusive.LibraryState`): that bounds the memory of workspaces. Branches that are to
overlap must not share a state, so an operator continues with the state of what it reads, if nobody else does, and every
other one takes the next in turn.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from dagexec.compiler.passes.draft import Draft
from dagexec.compiler.passes.rewriting import Pass
from dagexec.core.exclusive import STATES_PER_DEVICE
from dagexec.core.node import Node
from dagexec.core.registry import registered_engines
from dagexec.errors import DeviceError
from dagexec.platform.lazy import LazyModule

if not TYPE_CHECKING:
    binding = LazyModule("dagexec.devices.cuda.binding")
else:
    from dagexec.devices.cuda import binding


CUDNN = "CUDNN"


def assign_cudnn(draft: Draft) -> None:
    """Engine CUDNN for the operators that have it, if the library is there.

    An engine that a def names already stays.
    """
    try:
        binding.cudnn()
    except DeviceError:
        return
    changed: Counter[str] = Counter()
    for number, definition in draft.operators():
        kind = definition.type
        placed = definition.engine or (definition.device_option is not None and definition.device_option.device_type)
        if not placed and CUDNN in registered_engines(kind, "cuda"):
            draft.exchange(number, definition.changed(engine=CUDNN))
            changed[kind] += 1
    for kind, count in sorted(changed.items()):
        draft.changed(f"{count} {kind} by cuDNN")


def spread_states(draft: Draft) -> None:
    """Argument cudnn_state for the operators of engine CUDNN that have none."""
    states, count = _States(), 0
    for number, definition in draft.operators():
        if definition.engine == CUDNN and "cudnn_state" not in definition.values:
            draft.exchange(number, definition.changed(arguments={"cudnn_state": states.of(definition)}))
            count += 1
        states.passed_on(draft[number])
    if count:
        draft.changed(f"{count} operators over {STATES_PER_DEVICE} library states")


class _States:
    """Which state the operator before each blob used, until another one continues with it."""

    def __init__(self) -> None:
        self._behind: dict[str, int] = {}
        self._next = 0

    def of(self, definition: Node) -> int:
        """The state for an operator."""
        for name in definition.input:
            if name in self._behind:
                return self._behind.pop(name)
        state, self._next = self._next, (self._next + 1) % STATES_PER_DEVICE
        return state

    def passed_on(self, definition: Node) -> None:
        """What is behind `definition` may go on with its state, or with the one of what it reads."""
        own = definition.arguments().int("cudnn_state", 0) if "cudnn_state" in definition.values else None
        if own is None:
            own = next((self._behind.pop(name) for name in definition.input if name in self._behind), None)
        if own is not None and definition.output:
            self._behind[definition.output[0]] = own


CUDNN_ENGINE = Pass("cudnn-engine", "on CUDA, operators that cuDNN can compute name its engine", assign_cudnn)

CUDNN_STATES = Pass("cudnn-states", "when asked for: operators of cuDNN take turns at library states", spread_states)
