"""What compiling takes against the number of operators, by shape of graph: time, and memory beyond the file.

    python benchmarks/compile_time.py [--counts 1000,10000] [--json benchmarks/results/compile_time.json] [SHAPE...]

Each ONNX graph, of operators on 64 numbers, is compiled without tuning and run once, by dagexec as it comes, as a `dag`
net, and unoptimized, and by onnxruntime, each in a new process with an empty cache. Seconds are of the processor, all
threads; kilobytes are those by which the process's resident memory grows, at its peak, from the loaded model on,
over the operators of the file. Results are compared. With SHAPEs named, the other rows of the JSON file stay as they
are.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from environment import write_report
from onnx import TensorProto, helper

Array = npt.NDArray[Any]
Nodes = list[onnx.NodeProto]
CONTENDERS = ("dagexec", "dagexec dag", "dagexec unoptimized", "onnxruntime")
WIDTH = 64
TOLERANCE = 1e-3  # of the largest value


def chain(nodes: Nodes, count: int) -> str:
    """One after another, nothing of which fuses."""
    last = "x"
    for number in range(count):
        last = add(nodes, ("Softmax", "Add")[number % 2], [last, "c"][: 1 + number % 2], f"b{number}")
    return last


def fusing(nodes: Nodes, count: int) -> str:
    """Element-wise operators one after another."""
    last = "x"
    for number in range(count):
        last = add(nodes, ("Relu", "Add")[number % 2], [last, "c"][: 1 + number % 2], f"b{number}")
    return last


def wide(nodes: Nodes, count: int) -> str:
    """All read one result, and one reads all of theirs."""
    source = add(nodes, "Softmax", ["x"], "source")
    ends = [add(nodes, "LeakyRelu", [source], f"b{number}", alpha=1 / (number + 2)) for number in range(count - 2)]
    return add(nodes, "Sum", ends, "sum")


def layered(nodes: Nodes, count: int) -> str:
    """Layers of a hundred operators, each of which reads two of the layer before."""
    last = [add(nodes, "LeakyRelu", ["x"], f"first_{place}", alpha=1 / (place + 2)) for place in range(100)]
    for layer in range(count // 100):
        last = [
            add(
                nodes,
                "Add" if layer % 4 else "Max",
                [last[place], last[(7 * place + layer) % 100]],
                f"b{layer}_{place}",
            )
            for place in range(100)
        ]
        if layer % 4 == 3:
            last = [add(nodes, "Softmax", [name], f"{name}_s") for name in last]
    return add(nodes, "Sum", last, "sum")


def modules(nodes: Nodes, count: int) -> str:
    """Inception: three branches of different length, again and again."""
    last = "x"
    for module in range(count // 7):
        ends = []
        for branch in range(3):
            end = last
            for step in range(branch + 1):
                end = add(nodes, ("Softmax", "Sigmoid")[step % 2], [end], f"m{module}_{branch}_{step}")
            ends.append(end)
        last = add(nodes, "Sum", ends, f"m{module}")
    return last


def add(nodes: Nodes, kind: str, inputs: list[str], output: str, **attributes: Any) -> str:
    """Another node; gives its result."""
    nodes.append(helper.make_node(kind, inputs, [output], **attributes))
    return output


SHAPES: dict[str, Callable[[Nodes, int], str]] = {
    shape.__name__: shape for shape in (chain, fusing, wide, layered, modules)
}


def model(shape: str, count: int) -> onnx.ModelProto:
    """A graph of about so many nodes."""
    nodes: Nodes = []
    result = SHAPES[shape](nodes, count)
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, (1, WIDTH)) for name in ("x", "c", result)]
    graph = helper.make_graph(nodes, shape, values[:2], values[2:])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


# --- in a process of its own


def child(contender: str, file: str, outputs: str) -> None:
    """Compile and run once: seconds and bytes as JSON on the standard output, the result in the file `outputs`."""
    feeds = {name: np.random.default_rng(0).standard_normal((1, WIDTH), np.float32) for name in ("x", "c")}
    stages = (onnxruntime_stages if contender == "onnxruntime" else dagexec_stages)(contender, file, feeds)
    before = resident_bytes()
    times = [time.process_time()]
    result = None
    for stage in stages:
        result = stage()
        times.append(time.process_time())
    assert result is not None
    np.save(outputs, result)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"compile": times[1] - times[0], "first run": times[2] - times[1], "bytes": peak - before}))
    sys.stdout.flush()
    os._exit(0)  # what is made need not be taken down


def dagexec_stages(contender: str, file: str, feeds: Mapping[str, Array]) -> list[Callable[[], Any]]:
    import dagexec
    from dagexec.executor.source.loading import load_model

    dagexec.compile("zoo:lenet").close()  # what is done once a process
    loaded = load_model(file)
    net_type = "dag" if contender == "dagexec dag" else None
    optimize = contender != "dagexec unoptimized"
    made: list[Any] = []

    def build() -> None:
        made.append(dagexec.compile(loaded, tuning_seconds=0, net_type=net_type, optimize=optimize))

    return [build, lambda: next(iter(made[0].run(dict(feeds)).values()))]


def onnxruntime_stages(contender: str, file: str, feeds: Mapping[str, Array]) -> list[Callable[[], Any]]:
    import onnxruntime

    made: list[Any] = []

    def build() -> None:
        made.append(onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"]))

    def run() -> Any:
        needed = {value.name for value in made[0].get_inputs()}
        return made[0].run(None, {name: array for name, array in feeds.items() if name in needed})[0]

    return [build, run]


def resident_bytes() -> int:
    """Of this process, now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


# --- in the process that asks


def measure(shape: str, count: int, folder: Path) -> dict[str, Any]:
    """The row of one graph. Raises ValueError when results differ."""
    proto = model(shape, count)
    file = folder / "model.onnx"
    file.write_bytes(proto.SerializeToString())
    operators = len(proto.graph.node)
    row: dict[str, Any] = {
        "operators": operators,
        "file_kb_per_operator": round(file.stat().st_size / operators / 1e3, 3),
    }
    results: dict[str, Array] = {}
    for contender in CONTENDERS:
        command = [sys.executable, __file__, "--child", contender, os.fspath(file), os.fspath(folder / "result.npy")]
        environment = os.environ | {"DAGEXEC_CHOICES": "off"}
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, text=True)
        found = json.loads(done.stdout.splitlines()[-1])
        results[contender] = np.load(folder / "result.npy")
        row[contender] = {
            "compile_s": round(found["compile"], 3),
            "first_run_s": round(found["first run"], 3),
            "kb_per_operator": round(found["bytes"] / operators / 1e3, 2),
        }
    check(shape, results)
    return row


def check(shape: str, results: Mapping[str, Array]) -> None:
    """Raise ValueError where a result differs from onnxruntime's by more than the tolerance."""
    expected = results["onnxruntime"].astype(np.float64)
    for contender, result in results.items():
        difference = float(np.abs(result - expected).max())
        if not difference <= TOLERANCE * float(np.abs(expected).max()):
            raise ValueError(f"{shape}: {contender}'s result differs by {difference:.3g}")


def table(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """For people."""
    lines = []
    for name, row in rows.items():
        for contender in CONTENDERS:
            found = row[contender]
            lines.append(
                f"{name:18}{contender:22}{found['compile_s']:9.2f} s{found['first_run_s']:9.2f} s"
                f"{found['kb_per_operator']:9.2f} KB/operator"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="*", metavar="SHAPE", help=f"of {', '.join(SHAPES)}; all of them by default")
    parser.add_argument("--counts", default="1000,10000,100000")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(*options.child)
        return
    rows: dict[str, Any] = {}
    if options.json is not None and options.json.exists():
        rows = json.loads(options.json.read_text())["graphs"]
    with tempfile.TemporaryDirectory() as folder:
        for shape in options.shapes or SHAPES:
            for count in map(int, options.counts.split(",")):
                name = f"{shape}-{count}"
                rows[name] = measure(shape, count, Path(folder))
                print(table({name: rows[name]}), flush=True)
                if options.json is not None:
                    write_report(options.json, graphs=rows)


if __name__ == "__main__":
    main()
