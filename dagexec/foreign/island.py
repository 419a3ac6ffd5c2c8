"""Islands: connected parts of a net, each computed as a session of onnxruntime or OpenVINO.

A message has the operators; what it needs besides are arrays, which a session reads where they lie: constants while it
is made, and inputs and outputs, which are bound to it, in every run. Runtimes keep constants packed for their kernels
once more, as they see fit.
"""

from __future__ import annotations

import ctypes
import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy.typing as npt

from dagexec.core.profiled import Profiled
from dagexec.platform.forking import reset_after_fork, without_fork
from dagexec.platform.lazy import LazyModule
from dagexec.platform.records import dataclass

if not TYPE_CHECKING:
    metadata = LazyModule("importlib.metadata")
else:
    from importlib import metadata

    import onnx

Array = npt.NDArray[Any]

IslandRuntime = Literal["onnxruntime", "openvino"]
Shapes = tuple[tuple[int, ...], ...]

_MAX_REASON = 500  # characters


@dataclass(frozen=True, eq=False)
class IslandModel:
    """What a session is made of.

    Attributes:
        message: the operators, checked; its inputs are those of a run and then the constants.
        constants: the values of the last inputs, by name.
        threads: how many threads a run may use, the one that calls among them.
        specialized: whether the first shapes get a session of their own where one could serve all: it may be faster,
            and results of other shapes may have other last bits.
    """

    message: onnx.ModelProto
    constants: Mapping[str, Array]
    threads: int
    specialized: bool = False

    @property
    def inputs(self) -> list[onnx.ValueInfoProto]:
        """The inputs of a run."""
        return [value for value in self.message.graph.input if value.name not in self.constants]


class BoundIsland(ABC):
    """A session with arrays to read from and to write to. It may not be under way twice at once."""

    def __init__(self) -> None:
        reset_after_fork(self, leave_behind)

    @abstractmethod
    def __call__(self) -> None:
        """Run it: read the inputs anew, and write the outputs."""

    @abstractmethod
    def set_input(self, index: int, array: Array) -> None:
        """Have it read an input from another packed array of the same shape and type."""

    @abstractmethod
    def set_output(self, index: int, array: Array) -> None:
        """Have it write an output to another packed array of the same shape and type."""

    @abstractmethod
    def profiling(self) -> Profiled:
        """What runs it once, and tells what each of the runtime's own operators took."""


class IslandSession(ABC):
    """A part of a net made ready to run.

    Attributes:
        runtime: the package that runs it.
    """

    runtime: ClassVar[IslandRuntime]

    def __init__(self) -> None:
        reset_after_fork(self, leave_behind)

    @abstractmethod
    def bound(self, inputs: Sequence[Array], outputs: Sequence[Array]) -> BoundIsland:
        """The session on packed arrays of numbers or truth values, in the order of the message."""


def leave_behind(kept: object) -> None:
    """In a child made by `os.fork`: never end `kept`, a session or what holds one.

    Its threads stayed in the parent, and a runtime that ends a session waits for them.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))


def usable_runtimes(
    wanted: Iterable[IslandRuntime],
) -> tuple[dict[IslandRuntime, str], dict[IslandRuntime, str]]:
    """The versions of those of the wanted runtimes that are installed and can be imported, which they are by that.

    Also why others that are installed cannot be imported.
    """
    found: dict[IslandRuntime, str] = {}
    broken: dict[IslandRuntime, str] = {}
    for name in wanted:
        if importlib.util.find_spec(name) is None:
            continue
        try:
            with without_fork():
                importlib.import_module(name)
        except Exception as error:  # a library that is missing, or of another version
            reason = " ".join(str(error).split())[:_MAX_REASON]
            broken[name] = f"it is installed, but not as a whole: {type(error).__name__}: {reason}"
            continue
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:  # built from source, or a variant of another name
            found[name] = "unknown"
    return found, broken
