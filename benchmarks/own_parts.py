"""What packages lack that could stand in place of parts of dagexec's own: docs/dependencies.md has the rows.

    python benchmarks/own_parts.py --json benchmarks/results/own_parts.json

Assemblers are compared where iced-x86 and keystone-engine are installed, which dagexec itself does not need.
"""

from __future__ import annotations

import argparse
import graphlib
import importlib
import os
import random
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
from environment import write_report

from dagexec.errors import StorageError
from dagexec.platform.assembly.instructions import A0, A1, FMA
from dagexec.platform.assembly.x86_64_vectors import Assembler
from dagexec.scheduling.paths import longest_paths
from dagexec.server.grpc_codec import request_from
from dagexec.server.limits import Limits
from dagexec.server.proto import inference_pb2 as messages
from dagexec.storage import Mode, open_database

PAGE = 4096
FILES = 1000
CALLS = 1000


def best(call: Callable[[], object], repeat: int = 7) -> float:
    """Seconds of the fastest of some calls."""
    seconds = []
    for _ in range(repeat):
        begin = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - begin)
    return min(seconds)


def by_lmdb(folder: Path) -> dict[bytes, bytes]:
    """The records, by the package alone."""
    environment = lmdb.open(str(folder), readonly=True, lock=False)
    with environment.begin() as transaction:
        return dict(transaction.cursor())


def by_dagexec(folder: Path) -> dict[bytes, bytes]:
    """The records, of pages that were checked before."""
    with open_database("lmdb", folder) as database, database.cursor() as cursor:
        return dict(cursor)


def outcome(read: Callable[[Path], dict[bytes, bytes]], folder: Path, expected: dict[bytes, bytes]) -> str:
    """How a process ends that reads a damaged database."""
    child = os.fork()
    if not child:
        signal.alarm(10)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        try:
            os._exit(0 if read(folder) == expected else 2)
        except (lmdb.Error, StorageError, OSError):
            os._exit(1)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return ("right", "refused", "other records")[code] if code >= 0 else signal.Signals(-code).name


def damaged_databases() -> dict[str, dict[str, int]]:
    """How often each way to read a database of which some bytes are others ends how."""
    draw = random.Random(3)
    counts = {name: Counter[str]() for name in ("lmdb", "pages checked", "pages and checksum checked")}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "db"
        expected = {b"%08d" % key: draw.randbytes(draw.choice([10, 100, 300, 3000])) for key in range(900)}
        with open_database("lmdb", folder, Mode.NEW) as database, database.transaction() as writing:
            for item in expected.items():
                writing.put(*item)
        file, checksum = folder / "data.mdb", folder / "data.crc32"
        whole, sums = file.read_bytes(), checksum.read_bytes()
        for _ in range(FILES):
            damaged = bytearray(whole)
            for _ in range(3):
                within = draw.choice([draw.randrange(160), draw.randrange(PAGE - 8)])
                place = draw.randrange(len(whole) // PAGE) * PAGE + within
                number = draw.choice([draw.randbytes(8), draw.randrange(3000).to_bytes(8, "little")])
                damaged[place : place + 8] = number
            file.unlink()
            file.write_bytes(damaged)
            checksum.unlink(missing_ok=True)
            counts["lmdb"][outcome(by_lmdb, folder, expected)] += 1
            counts["pages checked"][outcome(by_dagexec, folder, expected)] += 1
            checksum.write_bytes(sums)
            counts["pages and checksum checked"][outcome(by_dagexec, folder, expected)] += 1
    return {name: dict(sorted(count.items())) for name, count in counts.items()}


def own_assembler() -> bytes:
    """Three instructions again and again: a load, a product that is added, a store."""
    written = Assembler(8)
    for number in range(CALLS):
        written.load(1, A0, A1, number % 64 * 32, 4)
        written.compute(FMA, 2, 1, 3)
        written.store(2, A0, None, number % 64 * 32)
    return written.code()


def iced() -> object:
    """The same by iced-x86."""
    from iced_x86 import BlockEncoder, Code, Instruction, MemoryOperand, Register

    encoder = BlockEncoder(64)
    for number in range(CALLS):
        offset = number % 64 * 32
        size = 1 if offset < 128 else 8
        source = MemoryOperand(Register.RDI, Register.RSI, 4, offset, size)
        target = MemoryOperand(Register.RDI, Register.NONE, 1, offset, size)
        vectors = Register.YMM2, Register.YMM1, Register.YMM3
        encoder.add(Instruction.create_reg_mem(Code.VEX_VMOVUPS_YMM_YMMM256, Register.YMM1, source))
        encoder.add(Instruction.create_reg_reg_reg(Code.VEX_VFMADD231PS_YMM_YMM_YMMM256, *vectors))
        encoder.add(Instruction.create_mem_reg(Code.VEX_VMOVUPS_YMMM256_YMM, target, Register.YMM2))
    return encoder.encode(0)


def keystone() -> object:
    """The same by Keystone, as text."""
    from keystone import KS_ARCH_X86, KS_MODE_64, Ks

    text = ";".join(
        f"vmovups ymm1, [rdi+rsi*4+{number % 64 * 32}]; vfmadd231ps ymm2, ymm1, ymm3; "
        f"vmovups [rdi+{number % 64 * 32}], ymm2"
        for number in range(CALLS)
    )
    return Ks(KS_ARCH_X86, KS_MODE_64).asm(text)


def assemblers() -> dict[str, float]:
    """Microseconds for an instruction."""
    contenders = {"dagexec": ("dagexec", own_assembler), "iced": ("iced_x86", iced), "keystone": ("keystone", keystone)}
    found = {}
    for name, (module, call) in contenders.items():
        try:
            importlib.import_module(module)
        except ImportError:
            continue
        found[name] = round(best(call) / CALLS / 3 * 1e6, 2)
    return found


def requests() -> dict[str, dict[str, float]]:
    """Microseconds of protobuf for a request with an image, and of dagexec for the arrays in its message."""
    image, limits, found = np.ones((1, 3, 224, 224), np.float32), Limits(), {}
    raw = messages.ModelInferRequest(model_name="m", raw_input_contents=[image.tobytes()])
    typed = messages.ModelInferRequest(model_name="m")
    for message in (raw, typed):
        message.inputs.add(name="x", datatype="FP32", shape=image.shape)
    typed.inputs[0].contents.fp32_contents.extend(image.ravel().tolist())
    for name, message in (("raw", raw), ("typed", typed)):
        sent = message.SerializeToString()
        found[name] = {
            "protobuf": round(best(lambda sent=sent: messages.ModelInferRequest.FromString(sent), 50) * 1e6, 1),  # type: ignore[misc]
            "dagexec": round(best(lambda message=message: request_from(message, limits), 50) * 1e6, 1),  # type: ignore[misc]
        }
    return found


def paths() -> dict[str, float]:
    """Milliseconds for the longest paths of 10,000 nodes, in the order of dagexec, graphlib and networkx."""
    import networkx as nx

    draw, count = random.Random(0), 10_000
    children = [[min(node + draw.randint(1, 50), count - 1)] * (node < count - 1) for node in range(count)]
    seconds = [1.0] * count

    def network() -> object:
        graph: nx.DiGraph[int] = nx.DiGraph((node, child) for node, row in enumerate(children) for child in row)
        return list(nx.topological_sort(graph))

    calls: dict[str, Callable[[], Any]] = {
        "dagexec": lambda: longest_paths(children, seconds),
        "graphlib": lambda: list(graphlib.TopologicalSorter(dict(enumerate(children))).static_order()),
        "networkx": network,
    }
    return {name: round(best(call) * 1e3, 1) for name, call in calls.items()}


def main() -> None:
    """Measure, print, and write the record if asked to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="where to write the record")
    options = parser.parse_args()
    found = {
        "damaged databases": damaged_databases(),
        "microseconds an instruction": assemblers(),
        "microseconds a request": requests(),
        "milliseconds of 10,000 nodes": paths(),
    }
    for name, values in found.items():
        print(f"{name}: {values}")
    if options.json is not None:
        write_report(options.json, **found)


if __name__ == "__main__":
    main()
