"""Per engine, a net of convolutions and gradients gives one set of bytes: any net type, workers and repetition."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from dagexec import NetDef, Workspace, create_shared_buffer
from dagexec.core.arguments import ArgumentValue
from tests.ops.running import Array, operator_def

RNG = np.random.default_rng(8)
Named = dict[str, ArgumentValue]
BLOBS: dict[str, Array] = {
    "x": RNG.normal(size=(3, 8, 17, 15)),
    "w3": RNG.normal(size=(6, 8, 3, 3)),
    "w1": RNG.normal(size=(5, 8, 1, 1)),
    "w5": RNG.normal(size=(4, 4, 5, 5)),
    "wd": RNG.normal(size=(8, 1, 3, 3)),
    "wt": RNG.normal(size=(6, 3, 3, 3)),
    "wl": RNG.normal(size=(4, 4, 5, 8, 3, 3)),
}


def branches(engine: str, **more: ArgumentValue) -> NetDef:
    """Convolutions of every kind beside each other and their gradients behind them."""
    net = NetDef(name="branches")
    layers: list[tuple[str, str, str, Named]] = [
        ("Conv", "x", "w3", {"kernel": 3, "pad": 1}),
        ("Conv", "x", "w1", {"kernel": 1}),
        ("Conv", "x", "w5", {"kernel": 5, "stride": 2, "group": 2}),
        ("Conv", "x", "wd", {"kernel": 3, "group": 8}),
        ("ConvTranspose", "y0", "wt", {"kernel": 3, "stride": 2, "adj": 1}),
        ("ConvTranspose", "y0", "wt", {"kernel": 3}),
    ]
    for number, (op_type, source, weights, arguments) in enumerate(layers):
        y = f"y{number}"
        net.op.append(operator_def(op_type, [source, weights], [y], **arguments, **more))
        gradients = [f"dw{number}", f"db{number}", f"dx{number}"]
        net.op.append(operator_def(f"{op_type}Gradient", [source, weights, y], gradients, **arguments, **more))
    for definition in net.op:
        definition.engine = engine
    return net


def poolings_and_columns() -> NetDef:
    """The rest of the family beside each other, and their gradients."""
    net = NetDef(name="poolings")
    for op_type in ("MaxPool", "AveragePool", "LpPool"):
        window: Named = {"kernel": 3, "stride": 2, "pad": 1}
        y, dx = f"{op_type}_y", f"{op_type}_dx"
        net.op.append(operator_def(op_type, ["x"], [y], **window))
        net.op.append(operator_def(f"{op_type}Gradient", ["x", y, y], [dx], **window))
    net.op.append(operator_def("MaxPoolWithIndex", ["x"], ["top", "mask"], kernel=3))
    net.op.append(operator_def("MaxPoolWithIndexGradient", ["x", "top", "mask"], ["top_dx"], kernel=3))
    net.op.append(operator_def("LC", ["x", "wl"], ["lc_y"], kernel=3, stride=4))
    net.op.append(operator_def("LCGradient", ["x", "wl", "lc_y"], ["lc_dw", "lc_db", "lc_dx"], kernel=3, stride=4))
    net.op.append(operator_def("Im2Col", ["x"], ["columns"], kernel=3, pad=1))
    net.op.append(operator_def("Col2Im", ["columns", "x"], ["image"], kernel=3, pad=1))
    net.op.append(operator_def("PadImage", ["x"], ["padded"], pad=3, mode="reflect"))
    net.op.append(operator_def("PadImageGradient", ["padded"], ["padded_dx"], pad=3, mode="reflect"))
    return net


def results(net: NetDef, net_type: str, workers: int, dtype: str, runs: int) -> set[str]:
    """The digests of all outputs, one entry for each different result."""
    workspace = Workspace()
    create_shared_buffer(workspace)
    for name, array in BLOBS.items():
        workspace.feed_blob(name, array.astype(dtype))
    built = workspace.create_net(net, net_type=net_type, num_workers=workers)
    found = set()
    for _ in range(runs):
        built.run()
        digest = hashlib.sha256()
        for definition in net.op:
            for name in definition.output:
                digest.update(workspace.fetch_blob(name).tobytes())
        found.add(digest.hexdigest())
    built.close()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("engine", ["", "WINOGRAD", "FFT", "DIRECT"])
def test_an_engine_gives_the_same_bytes_under_every_net_and_number_of_workers(engine: str, dtype: str) -> None:
    found = results(branches(engine), "simple", 1, dtype, 2)
    assert len(found) == 1
    for net_type in ("dag", "async_dag"):
        for workers in (1, 2, 4):
            assert results(branches(engine), net_type, workers, dtype, 5) == found
    assert results(branches(engine, shared_buffer=1), "dag", 4, dtype, 5) == found


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_poolings_and_columns_give_the_same_bytes_under_every_net_and_number_of_workers(dtype: str) -> None:
    found = results(poolings_and_columns(), "simple", 1, dtype, 2)
    assert len(found) == 1
    for net_type in ("dag", "async_dag"):
        for workers in (1, 2, 4):
            assert results(poolings_and_columns(), net_type, workers, dtype, 5) == found


def test_engines_sum_in_different_orders() -> None:
    """So the test above compares what may differ."""
    found = {engine: results(branches(engine), "simple", 1, "float32", 1).pop() for engine in ("", "WINOGRAD", "FFT")}
    assert len(set(found.values())) == 3
