"""Everything of dagexec that writes what must survive, each with a way to tell which of three versions is there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx

from dagexec import InputInfo, Model, NetDef, Workspace
from dagexec.analysis.plot import draw_graph
from dagexec.cli.run import save_arrays
from dagexec.core.choices import Choices
from dagexec.core.dtypes import FLOAT32
from dagexec.core.graph import build_graph
from dagexec.core.operator_def import op
from dagexec.devices.cuda import compilation
from dagexec.export import onnx_model
from dagexec.lab.graph import work_graph
from dagexec.lab.wfformat import read_wfformat, write_wfformat
from dagexec.platform.files import written_atomically
from dagexec.report.document import Report
from dagexec.scheduler.plan.plan import build_plan
from dagexec.storage import Mode, database_exists, open_database
from dagexec.storage.blob_file import read_blob_file, write_blobs
from dagexec.storage.net_file import load_net, save_net
from dagexec.training.checkpoint import latest_checkpoint, load_checkpoint, save_checkpoint
from dagexec.training.safetensors_file import export_safetensors, read_safetensors

NOTHING = 0
RECORDS = 3  # of a transaction


@dataclass(frozen=True)
class Writer:
    """What writes a version (1, 2, ...) of something below a folder, and tells which is there.

    Attributes:
        write: to be there when it returns.
        read: the version; `NOTHING` when there is none. Raises for one that is torn.
        quiet: what cannot be written is told in the log only.
    """

    write: Callable[[Path, int], object]
    read: Callable[[Path], int]
    quiet: bool = False


def of_file(
    name: str, write: Callable[[Path, int], object], read: Callable[[Path], int], *, quiet: bool = False
) -> Writer:
    """A writer of one file, or of a folder that is as good as one."""

    def found(folder: Path) -> int:
        return read(folder / name) if (folder / name).exists() else NOTHING

    return Writer(lambda folder, version: write(folder / name, version), found, quiet)


def net(version: int) -> NetDef:
    relus = [op("Relu", [f"x{number}"], [f"x{number + 1}"]) for number in range(version)]
    return NetDef(name=f"net {version}", op=relus, external_input=["x0"], external_output=[f"x{version}"])


def version_of_net(path: Path) -> int:
    found = load_net(path)
    assert found == net(len(found.op))
    return len(found.op)


def workspace(version: int) -> Workspace:
    found = Workspace()
    found.feed_blob("w", np.full((30, 40), version, np.float32))
    found.feed_blob("b", np.full(7, version, np.int64))
    return found


def version_of(*arrays: np.ndarray) -> int:
    versions = {float(value) for array in arrays for value in array.ravel()}
    assert len(versions) == 1
    return int(versions.pop())


def save(folder: Path, version: int, db_type: str, step: int) -> None:
    save_checkpoint(workspace(version), ["w", "b"], folder / "runs" / "one", step, db_type=db_type, keep=1)


def newest(folder: Path) -> int:
    path = latest_checkpoint(folder / "runs" / "one")
    if path is None:
        return NOTHING
    there = Workspace()
    load_checkpoint(there, path)
    return version_of(there.fetch_blob("w"), there.fetch_blob("b"))


def checkpoints(db_type: str) -> Writer:
    """Of one step after another; the last one is kept."""
    return Writer(lambda folder, version: save(folder, version, db_type, version), newest)


def rewritten(db_type: str) -> Writer:
    """Of the same step again."""
    return Writer(lambda folder, version: save(folder, version, db_type, 7), newest)


def blobs(db_type: str) -> Writer:
    def write(path: Path, version: int) -> None:
        write_blobs(db_type, path, [("w", np.full((30, 40), version, np.float32))], chunk_size=400)

    def read(path: Path) -> int:
        if not database_exists(db_type, path):  # a folder where lmdb has only begun
            return NOTHING
        return version_of(read_blob_file(db_type, path, require_checksums=True).tensors["w"])

    return of_file(f"blobs.{db_type}", write, read)


def added(db_type: str) -> Writer:
    """Records are added to those that are there."""

    def write(path: Path, version: int) -> None:
        mode = Mode.NEW if version == 1 else Mode.WRITE
        with open_database(db_type, path, mode) as database, database.transaction() as transaction:
            for number in range(RECORDS):
                transaction.put(b"%d %d" % (version, number), b"value" * 2000)

    def read(path: Path) -> int:
        if not database_exists(db_type, path):
            return NOTHING
        with open_database(db_type, path) as database, database.cursor() as cursor:
            found = list(cursor)
        assert all(value == b"value" * 2000 for _, value in found)
        keys = [key for key, _ in found]
        versions = sorted({int(key.split()[0]) for key in keys})
        assert sorted(keys) == [b"%d %d" % (version, number) for version in versions for number in range(RECORDS)]
        return max(versions, default=NOTHING)

    return of_file(f"records.{db_type}", write, read)


def write_choices(path: Path, version: int) -> None:
    choices = Choices()
    choices.keep("key", str(version))
    choices.save(path)


def flush_choices(folder: Path, version: int) -> None:
    choices = Choices()
    choices._file, choices._looked = folder / "cache" / "dagexec" / "choices.json", True
    choices.keep("key", str(version))
    choices.flush()


def version_of_choices(path: Path) -> int:
    choices = Choices()
    choices.load(path)
    return int(choices._loaded["key"])


def flushed_choices(folder: Path) -> int:
    path = folder / "cache" / "dagexec" / "choices.json"
    return version_of_choices(path) if path.exists() else NOTHING


def model(version: int) -> Model:
    parameters = {"w": np.full((300, 4), version, np.float32), "b": np.full(300, version, np.float32)}
    nodes = NetDef(name="net", op=[op("FC", ["x", "w", "b"], ["y"])], external_input=["x", "w", "b"])
    return Model("net", nodes, parameters=parameters, inputs={"x": InputInfo(FLOAT32, (1, 4))}, outputs=("y",))


def write_in_two(path: Path, version: int) -> None:
    onnx_model._save_in_two(onnx_model.to_onnx(model(version)), path)


def version_of_model(path: Path) -> int:
    proto = onnx.load(path)
    assert len(proto.graph.initializer) == 2
    return version_of(*map(onnx.numpy_helper.to_array, proto.graph.initializer))


def write_results(path: Path, version: int) -> None:
    with written_atomically(path) as file:
        save_arrays(file, {"y": np.full(3000, version)})


def version_of_results(path: Path) -> int:
    with np.load(path) as archive:
        return version_of(archive["y"])


def write_kernel(folder: Path, version: int) -> None:
    compilation._keep(folder / "kernels" / "key", b"%d" % version * 999)


def version_of_kernel(folder: Path) -> int:
    content = compilation._read(folder / "kernels" / "key")
    return NOTHING if content is None else next(version for version in (1, 2, 3) if content == b"%d" % version * 999)


def drawn(path: Path, version: int) -> None:
    draw_graph(build_plan(build_graph(net(version)), [1.0] * version), path)


def version_of_drawing(path: Path) -> int:
    text = path.read_text()
    assert text.rstrip().endswith("}")
    return text.count("Relu")


def version_of_report(path: Path) -> int:
    text = path.read_text()
    assert text.rstrip().endswith("</html>")
    return next(version for version in (1, 2, 3) if f"version {version}" in text)


def write_tasks(path: Path, version: int) -> None:
    write_wfformat(work_graph("tasks", [(f"task {number}", 1.0, []) for number in range(version)]), path)


WRITERS: dict[str, Writer] = {
    "net": of_file("net.pb", lambda path, version: save_net(net(version), path), version_of_net),
    "net as text": of_file("net.pbtxt", lambda path, version: save_net(net(version), path), version_of_net),
    "choices": of_file("choices.json", write_choices, version_of_choices),
    "cache of choices": Writer(flush_choices, flushed_choices, quiet=True),
    "cache of kernels": Writer(write_kernel, version_of_kernel, quiet=True),
    "drawing": of_file("graph.dot", drawn, version_of_drawing),
    "report": of_file(
        "report.html", lambda path, version: Report(f"version {version}", (), ()).write(path), version_of_report
    ),
    "task graph": of_file("tasks.json", write_tasks, lambda path: len(read_wfformat(path).tasks)),
    "results": of_file("results.npz", write_results, version_of_results),
    "ONNX": of_file("model.onnx", lambda path, version: onnx_model.save_onnx(model(version), path), version_of_model),
    "ONNX in two files": of_file("model.onnx", write_in_two, version_of_model),
    "safetensors": of_file(
        "weights.safetensors",
        lambda path, version: export_safetensors(workspace(version), ["w", "b"], path),
        lambda path: version_of(*read_safetensors(path).values()),
    ),
    "checkpoint": checkpoints("minidb"),
    "checkpoint of lmdb": checkpoints("lmdb"),
    "checkpoint again": rewritten("minidb"),
    "checkpoint of lmdb again": rewritten("lmdb"),
    "blobs": blobs("minidb"),
    "blobs in lmdb": blobs("lmdb"),
    "records": added("minidb"),
    "records in lmdb": added("lmdb"),
}
