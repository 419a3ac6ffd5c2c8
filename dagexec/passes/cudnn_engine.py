"""Pass `cudnn-engine`: on CUDA, operators that cuDNN can compute name its engine, and the library state they use.

Each state has a stream, a handle and a workspace of its own (`core.exclusive.LibraryState`), so branches of a net that
are to overlap must not share one. An operator goes on with the state of what it reads, if that has nobody else behind
it; every other one takes the next state in turn. Where cuDNN is absent nothing changes.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from dagexec.core.arguments import make_argument
from dagexec.core.cuda.binding import cudnn
from dagexec.core.errors import DeviceError
from dagexec.core.exclusive import STATES_PER_DEVICE
from dagexec.core.model import Model
from dagexec.core.proto import NetDef, OperatorDef
from dagexec.core.registry import ANY_OPERATOR, engine_preferences, registered_engines
from dagexec.passes.rewriting import Pass, Rewritten

CUDNN = "CUDNN"


def assign_cudnn(model: Model) -> Rewritten:
    """`model` with engine CUDNN, and argument cudnn_state, on the operators that have it, if the library is there.

    An engine that a def names already, and one that is preferred for its type (`set_engine_preference`), stay.
    """
    try:
        cudnn()
    except DeviceError:
        return Rewritten(model)
    net = NetDef()
    net.CopyFrom(model.net)
    preferred = {kind for (device, kind), engines in engine_preferences().items() if device == "cuda" and engines}
    changed: Counter[str] = Counter()
    states = _States()
    for definition in net.op:
        free = not definition.engine and not definition.device_option.device_type
        if (
            free
            and not preferred & {definition.type, ANY_OPERATOR}
            and CUDNN in registered_engines(definition.type, "cuda")
        ):
            definition.engine = CUDNN
            if all(argument.name != "cudnn_state" for argument in definition.arg):
                definition.arg.append(make_argument("cudnn_state", states.of(definition)))
            changed[definition.type] += 1
        states.passed_on(definition)
    if not changed:
        return Rewritten(model)
    return Rewritten(
        replace(model, net=net), tuple(f"{count} {kind} by cuDNN" for kind, count in sorted(changed.items()))
    )


class _States:
    """Which state the operator before each blob used, until another one goes on with it."""

    def __init__(self) -> None:
        self._behind: dict[str, int] = {}
        self._next = 0

    def of(self, definition: OperatorDef) -> int:
        """The state for an operator."""
        for name in definition.input:
            if name in self._behind:
                return self._behind.pop(name)
        state, self._next = self._next, (self._next + 1) % STATES_PER_DEVICE
        return state

    def passed_on(self, definition: OperatorDef) -> None:
        """What is behind `definition` may go on with its state, or with the one of what it reads."""
        own = next((argument.i for argument in definition.arg if argument.name == "cudnn_state"), None)
        if own is None:
            own = next((self._behind.pop(name) for name in definition.input if name in self._behind), None)
        if own is not None and definition.output:
            self._behind[definition.output[0]] = own


CUDNN_ENGINE = Pass("cudnn-engine", "on CUDA, operators that cuDNN can compute name its engine", assign_cudnn)
