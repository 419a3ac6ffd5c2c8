"""Model: a net that can be run, its parameters, and what goes in and comes out.

Frontends (`dagexec.frontend`), the zoo and the model helper make Models; the executor runs them. A Model is data: it
holds no workspace and no threads, and several executors may share one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy.typing as npt

from dagexec.core.dtypes import TypeMeta
from dagexec.core.io_access import IO
from dagexec.core.proto import NetDef


@dataclass(frozen=True, slots=True)
class InputInfo:
    """What is known of a model input before it is fed.

    Attributes:
        dtype: the element type, or None when the model does not say (Caffe2's files do not).
        shape: the axes, None for one of any size; or None when even their number is unknown.
    """

    dtype: TypeMeta | None = None
    shape: tuple[int | None, ...] | None = None

    def __str__(self) -> str:
        axes = "[...]" if self.shape is None else f"[{', '.join('?' if n is None else str(n) for n in self.shape)}]"
        return f"{self.dtype or 'any'}{axes}"


@dataclass(frozen=True)
class Model:
    """A model as every part of dagexec passes it on.

    Attributes:
        name: for messages.
        net: the net of one run. It reads inputs, parameters and the outputs of `init_net`.
        init_net: run once before the first run; it computes parameters, from `parameters` or from nothing. Or None.
        parameters: arrays the nets read, by blob name. They are read-only and not copied.
        inputs: blobs a caller feeds before each run, in the model's order.
        outputs: blobs that are the result of a run.
        folder: what the paths of storage operators are relative to: of a model from files, where these are.
        allow_io: what its operators may reach beside blobs.
    """

    name: str
    net: NetDef
    init_net: NetDef | None = None
    parameters: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)
    inputs: Mapping[str, InputInfo] = field(default_factory=dict)
    outputs: tuple[str, ...] = ()
    folder: Path = Path()
    allow_io: IO = IO.NONE

    def needed_inputs(self) -> frozenset[str]:
        """The inputs that the net reads or returns. Caffe2's files may declare more, such as labels."""
        used = {name for operator in self.net.op for name in operator.input} | set(self.outputs)
        return frozenset(used & self.inputs.keys())
