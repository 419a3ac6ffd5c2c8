"""examples/plugin, built and installed into a folder of its own: `dagexec` uses what it adds, in new processes."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

ROOT = Path(__file__).parent.parent
DAGEXEC = [sys.executable, "-c", "from dagexec.cli import main; main()"]
X = np.linspace(-3, 3, 12, dtype=np.float32).reshape(2, 6)
EXPECTED = 0.5 * np.tanh(np.maximum(X, 0).astype(np.float64) / 0.5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package, in `installed`, its source, a model of its domain, and inputs."""
    folder = tmp_path_factory.mktemp("plugin")
    shutil.copytree(ROOT / "examples" / "plugin", folder / "source")
    alone = [] if find_spec("hatchling") is None else ["--no-build-isolation", "--no-index"]
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile", *alone]
    subprocess.run([*install, "--target", folder / "installed", folder / "source"], check=True, capture_output=True)
    nodes = [
        helper.make_node("Relu", ["x"], ["first"]),
        helper.make_node("Relu", ["first"], ["second"]),
        helper.make_node("Saturate", ["second"], ["y"], domain="com.example", bound=0.5),
    ]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2, 6]) for name in "xy"]
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.example", 1)]
    graph = helper.make_graph(nodes, "saturated", ends[:1], ends[1:])
    onnx.save(helper.make_model(graph, opset_imports=opsets), folder / "model.onnx")
    np.savez(folder / "in.npz", x=X)
    return folder


def environment(folder: Path, **more: str) -> dict[str, str]:
    """Where the package is installed."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(folder / "installed")]), **more}


def dagexec(folder: Path, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*DAGEXEC, *words], cwd=folder, env=environment(folder, **more), capture_output=True, text=True, check=False
    )


@pytest.mark.slow
def test_the_commands_use_what_the_package_adds(folder: Path) -> None:
    listed = json.loads(dagexec(folder, "plugins", "--json").stdout)["plugins"]
    assert [(one["name"], one["package"], one["version"], one["problem"]) for one in listed] == [
        (name, "dagexec-saturate", "1.0", "") for name in ("Saturate", "relu-of-relu", "slowest")
    ]
    ran = dagexec(
        folder, "run", "model.onnx", "--input", "in.npz", "--output", "out.npz", "--pass", "relu-of-relu",
        DAGEXEC_OBSERVERS="slowest",
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert re.search(r"^saturated: slowest: .* ms$", ran.stderr, re.MULTILINE)
    np.testing.assert_allclose(np.load(folder / "out.npz")["y"], EXPECTED, rtol=1e-5)
    built = dagexec(folder, "build", "model.onnx", "-o", "plan.dagexec", "--pass", "relu-of-relu")
    assert built.returncode == 0, built.stderr
    ran = dagexec(folder, "run", "plan.dagexec", "--input", "in.npz", "--output", "again.npz")
    assert ran.returncode == 0, ran.stderr
    assert "compiled anew" not in ran.stderr
    assert np.load(folder / "again.npz")["y"].tobytes() == np.load(folder / "out.npz")["y"].tobytes()
    off = dagexec(folder, "run", "model.onnx", "--input", "in.npz", DAGEXEC_PLUGINS="off")
    assert off.returncode == 2
    assert "Saturate" in off.stderr


@pytest.mark.slow
def test_the_tests_of_the_package_pass(folder: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", "source", "source/tests"]
    done = subprocess.run(command, cwd=folder, env=environment(folder), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert "passed" in done.stdout
