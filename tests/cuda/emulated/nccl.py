"""The stand-in for `cupy.cuda.nccl`: collectives that wait for all their ranks, on the emulated streams."""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np

from tests.cuda.emulated.errors import EmulationError
from tests.cuda.emulated.machine import Machine
from tests.cuda.emulated.races import Touch
from tests.cuda.emulated.work import EmulatedEvent, Operation

_TYPES: dict[int, Any] = {
    0: np.int8, 1: np.uint8, 2: np.int32, 3: np.uint32, 4: np.int64, 5: np.uint64, 6: np.float16, 7: np.float32,
    8: np.float64, 9: ml_dtypes.bfloat16,
}  # fmt: skip
_OPERATIONS: dict[int, Callable[[Any, Any], Any]] = {
    0: np.add, 1: np.multiply, 2: np.maximum, 3: np.minimum, 4: np.add
}  # fmt: skip
_AVERAGE = 4
_ERRORS = {
    1: "NCCL_ERROR_UNHANDLED_CUDA_ERROR: unhandled cuda error",
    4: "NCCL_ERROR_INVALID_ARGUMENT: invalid argument",
    5: "NCCL_ERROR_INVALID_USAGE: invalid usage",
}
_ID_BYTES = 128


class NcclError(RuntimeError):
    """`cupy.cuda.nccl.NcclError`."""

    def __init__(self, status: int) -> None:
        super().__init__(_ERRORS[status])
        self.status = status


@dataclass
class _Part:
    """What one rank brings to a collective."""

    kind: str
    details: tuple[Any, ...]
    dtype: Any
    send: tuple[int, int] | None
    receive: tuple[int, int] | None
    stream: int
    device: int


@dataclass(eq=False)
class _Clique:
    """The communicators that belong together."""

    size: int
    members: dict[int, NcclCommunicator] = field(default_factory=dict)
    waiting: dict[int, dict[int, _Part]] = field(default_factory=dict)
    lock: threading.RLock = field(default_factory=threading.RLock)
    joined: threading.Condition = field(default_factory=threading.Condition)


class NcclCommunicator:
    """`cupy.cuda.nccl.NcclCommunicator`. A collective is done once every rank asked for it, as one piece of work that
    comes after what is on each rank's stream and before what follows there."""

    _module: NcclModule

    def __init__(self, ndev: int, commId: tuple[int, ...], rank: int) -> None:
        module = self._module
        assert len(commId) == _ID_BYTES
        if not 0 <= rank < ndev:
            raise NcclError(4)
        clique = module._cliques.setdefault(commId, _Clique(ndev))
        self._join(clique, rank, module._machine.device)
        if not module._depth:
            with clique.joined:
                if not clique.joined.wait_for(lambda: len(clique.members) == ndev, 30):
                    raise EmulationError(f"rank {rank} of {ndev} waits for the others to connect")

    def _join(self, clique: _Clique, rank: int, device: int) -> None:
        if rank in clique.members or any(other._device == device for other in clique.members.values()):
            raise NcclError(5)
        self._clique: _Clique | None = clique
        if clique not in self._module._all:
            self._module._all.append(clique)
        self._rank, self._device, self._asked = rank, device, 0
        with clique.joined:
            clique.members[rank] = self
            clique.joined.notify_all()

    @classmethod
    def initAll(cls, devices: int | list[int]) -> list[NcclCommunicator]:
        listed = list(range(devices)) if isinstance(devices, int) else devices
        if any(not 0 <= device < len(cls._module._machine.devices) for device in listed):
            raise NcclError(4)
        clique = _Clique(len(listed))
        made = []
        for rank, device in enumerate(listed):
            one = object.__new__(cls)
            one._join(clique, rank, device)
            made.append(one)
        return made

    def destroy(self) -> None:
        self._clique = None

    def abort(self) -> None:
        self._clique = None

    def check_async_error(self) -> None:
        self._found()

    def device_id(self) -> int:
        self._found()
        return self._device

    def rank_id(self) -> int:
        self._found()
        return self._rank

    def size(self) -> int:
        return self._found().size

    @property
    def comm(self) -> int:
        return id(self._clique) if self._clique else 0

    def _found(self) -> _Clique:
        if self._clique is None:
            raise NcclError(4)
        return self._clique

    def allReduce(self, sendbuf: int, recvbuf: int, count: int, datatype: int, op: int, stream: int) -> None:
        self._ask("allReduce", (count, op), datatype, (sendbuf, count), (recvbuf, count), stream)

    def reduce(self, sendbuf: int, recvbuf: int, count: int, datatype: int, op: int, root: int, stream: int) -> None:
        target = (recvbuf, count) if root == self._rank else None
        self._ask("reduce", (count, op, root), datatype, (sendbuf, count), target, stream)

    def broadcast(self, sendbuff: int, recvbuff: int, count: int, datatype: int, root: int, stream: int) -> None:
        source = (sendbuff, count) if root == self._rank else None
        self._ask("broadcast", (count, root), datatype, source, (recvbuff, count), stream)

    def bcast(self, buff: int, count: int, datatype: int, root: int, stream: int) -> None:
        self.broadcast(buff, buff, count, datatype, root, stream)

    def reduceScatter(self, sendbuf: int, recvbuf: int, recvcount: int, datatype: int, op: int, stream: int) -> None:
        source = (sendbuf, recvcount * self._found().size)
        self._ask("reduceScatter", (recvcount, op), datatype, source, (recvbuf, recvcount), stream)

    def allGather(self, sendbuf: int, recvbuf: int, count: int, datatype: int, stream: int) -> None:
        target = (recvbuf, count * self._found().size)
        self._ask("allGather", (count,), datatype, (sendbuf, count), target, stream)

    def _ask(
        self,
        kind: str,
        details: tuple[Any, ...],
        datatype: int,
        send: tuple[int, int] | None,
        receive: tuple[int, int] | None,
        stream: int,
    ) -> None:
        module, clique = self._module, self._found()
        if datatype not in _TYPES or (
            kind in ("allReduce", "reduce", "reduceScatter") and details[1] not in _OPERATIONS
        ):
            raise NcclError(4)
        module._machine.called(f"nccl.{kind}", stream, self._rank, *details)
        part = _Part(kind, details, _TYPES[datatype], send, receive, stream, self._device)
        if module._machine.stream(stream).device != self._device:
            raise NcclError(4)
        number, self._asked = self._asked, self._asked + 1
        asked = (clique, number, self._rank, part)
        if module._depth:
            module._group.append(asked)
        else:
            module._add(*asked)


class NcclModule:
    """`cupy.cuda.nccl`."""

    available = True
    NcclError = NcclError
    NCCL_INT8, NCCL_CHAR, NCCL_UINT8, NCCL_INT32, NCCL_INT, NCCL_UINT32, NCCL_INT64, NCCL_UINT64 = (
        0,
        0,
        1,
        2,
        2,
        3,
        4,
        5,
    )
    NCCL_FLOAT16, NCCL_HALF, NCCL_FLOAT32, NCCL_FLOAT, NCCL_FLOAT64, NCCL_DOUBLE, NCCL_BFLOAT16 = 6, 6, 7, 7, 8, 8, 9
    NCCL_SUM, NCCL_PROD, NCCL_MAX, NCCL_MIN, NCCL_AVG = 0, 1, 2, 3, 4

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._cliques: dict[tuple[int, ...], _Clique] = {}
        self._all: list[_Clique] = []
        self._numbers = itertools.count(1)
        self._thread = threading.local()
        self.NcclCommunicator = type("NcclCommunicator", (NcclCommunicator,), {"_module": self})

    def get_version(self) -> int:
        return 22800

    def get_build_version(self) -> int:
        return 22800

    def get_unique_id(self) -> tuple[int, ...]:
        return (*next(self._numbers).to_bytes(8, "little"), *[0] * (_ID_BYTES - 8))

    @property
    def _depth(self) -> int:
        found: int = getattr(self._thread, "depth", 0)
        return found

    @property
    def _group(self) -> list[Any]:
        found: list[Any] = self._thread.group
        return found

    def groupStart(self) -> None:
        if not self._depth:
            self._thread.group = []
        self._thread.depth = self._depth + 1

    def groupEnd(self) -> None:
        if not self._depth:
            raise NcclError(5)
        self._thread.depth = self._depth - 1
        if not self._depth:
            for asked in self._group:
                self._add(*asked)
            self._thread.group = []

    def _add(self, clique: _Clique, number: int, rank: int, part: _Part) -> None:
        with clique.lock:
            parts = clique.waiting.setdefault(number, {})
            parts[rank] = part
            if len(parts) == clique.size:
                del clique.waiting[number]
                self._launch([parts[rank] for rank in range(clique.size)])

    def _check(self) -> None:
        """Raises EmulationError when a rank waits for a collective that others never asked for."""
        for clique in self._all:
            for number, parts in clique.waiting.items():
                missing = sorted(set(range(clique.size)) - set(parts))
                kind = next(iter(parts.values())).kind
                raise EmulationError(f"collective {number} ({kind}) waits for ranks {missing}, which never ask for it")

    def _launch(self, parts: list[_Part]) -> None:
        machine = self._machine
        first = parts[0]
        if any((part.kind, part.details, part.dtype) != (first.kind, first.details, first.dtype) for part in parts):
            raise EmulationError(
                "ranks ask for different collectives, which would never end: "
                + "; ".join(f"{part.kind}{part.details}" for part in parts)
            )
        item = np.dtype(first.dtype).itemsize
        touches: list[Touch] = []
        for part in parts:
            for place, writes in ((part.send, False), (part.receive, True)):
                if place is not None and place[1]:
                    touches.append(machine.device_touch(place[0], place[1] * item, writes, part.device))
        before = machine.device
        try:
            self._join_streams(parts, into=first.stream)
            machine.device = first.device
            step = lambda: _compute(parts)  # noqa: E731
            machine.submit(first.stream, Operation(f"nccl.{first.kind}", step, first.device, touches))
            self._join_streams(parts, out_of=first.stream)
        finally:
            machine.device = before

    def _join_streams(self, parts: list[_Part], into: int | None = None, out_of: int | None = None) -> None:
        """Let one stream wait for all others, or all others for one."""
        machine = self._machine
        one = machine.stream(into if into is not None else out_of or 0)
        for part in parts:
            stream = machine.stream(part.stream)
            if stream is one:
                continue
            source, target = (stream, one) if into is not None else (one, stream)
            event = EmulatedEvent(0, source.device, 2)
            machine.record_event(event, source)
            machine.wait_event(target, event)


def _view(place: tuple[int, int], dtype: Any) -> np.ndarray[Any, Any]:
    pointer, count = place
    if not count:
        return np.empty(0, dtype)
    size = count * np.dtype(dtype).itemsize
    return np.frombuffer((ctypes.c_ubyte * size).from_address(pointer), np.uint8).view(dtype)


def _compute(parts: list[_Part]) -> None:
    first = parts[0]
    sent = [None if part.send is None else _view(part.send, part.dtype).copy() for part in parts]
    if first.kind == "broadcast":
        result: Any = sent[first.details[1]]
    elif first.kind == "allGather":
        result = np.concatenate([one for one in sent if one is not None])
    else:
        wide = np.float32 if np.dtype(first.dtype).itemsize == 2 else first.dtype
        found = [one.astype(wide) for one in sent if one is not None]
        result = found[0]
        with np.errstate(over="ignore", invalid="ignore"):
            for one in found[1:]:
                result = _OPERATIONS[first.details[1]](result, one)
        if first.details[1] == _AVERAGE:
            result = (
                result / len(found) if wide is not first.dtype or np.dtype(wide).kind == "f" else result // len(found)
            )
        result = result.astype(first.dtype)
    for rank, part in enumerate(parts):
        if part.receive is None:
            continue
        target = _view(part.receive, part.dtype)
        begin = rank * len(target) if first.kind == "reduceScatter" else 0
        target[...] = result[begin : begin + len(target)]
