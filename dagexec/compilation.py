"""Compilation: what kind of net a model becomes, and with how many threads it runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from dagexec.core.device import CPU, Device
from dagexec.core.errors import SchemaError
from dagexec.core.feeds import Feeds
from dagexec.core.model import Model
from dagexec.scheduler import intra_op

Precision = Literal["float32", "bfloat16", "int8"]

NET_TYPES = ("simple", "dag", "async_dag")


@dataclass(frozen=True)
class CompileOptions:
    """How a model is to be compiled; `dagexec.compile` says what each option does. None: to be chosen.

    Attributes:
        replicas: how many runs may be in flight at once.
        keep: blobs that can be asked for beside the model's outputs.
        calibration: inputs, each for one run, that ranges for int8 are taken from.
    """

    optimize: bool = True
    net_type: str | None = None
    num_workers: int | None = None
    intra_op_threads: int | None = None
    replicas: int = 1
    device: Device = CPU
    without_passes: frozenset[str] = frozenset()
    keep: frozenset[str] = frozenset()
    shapes: Mapping[str, Sequence[int]] | None = None
    tuning_seconds: float | None = None
    dtype: Precision = "float32"
    calibration: tuple[Feeds, ...] = ()

    def __post_init__(self) -> None:
        """Raises SchemaError for an unknown net type, ValueError for anything else that is out of range."""
        if self.net_type is not None and self.net_type not in NET_TYPES:
            raise SchemaError(f"net type {self.net_type!r} is unknown; expected one of {', '.join(NET_TYPES)}")
        if self.replicas < 1:
            raise ValueError(f"at least 1 replica is needed, not {self.replicas}")
        if self.intra_op_threads is not None and self.intra_op_threads < 1:
            raise ValueError(f"at least 1 intra-op thread is needed, not {self.intra_op_threads}")
        if self.num_workers is not None and self.num_workers < 1:
            raise ValueError(f"at least 1 worker is needed, not {self.num_workers}")
        if self.dtype not in get_args(Precision):
            raise ValueError(f"dtype is one of {', '.join(get_args(Precision))}, not {self.dtype!r}")
        if self.tuning_seconds is not None and not self.tuning_seconds >= 0:
            raise ValueError(f"tuning_seconds must be 0 or more, not {self.tuning_seconds}")


@dataclass(frozen=True)
class Compiled:
    """A model as it is going to run, and with what. `report` says what was done to it; None when nothing was."""

    model: Model
    net_type: str
    num_workers: int
    intra_op_threads: int
    report: object = None


def compile_model(model: Model, options: CompileOptions) -> Compiled:
    """Choose for `model` what `options` leave open."""
    net_type = options.net_type or "dag"
    threads = options.intra_op_threads or 1
    workers = options.num_workers or max(1, intra_op.available_cores() // threads)
    if options.num_workers is None and net_type == "simple":
        workers = min(workers, options.replicas)
    return Compiled(model, net_type, workers, threads)
