"""Every command and snippet of the README runs, with what `make compare` installs and no other optional package."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests import mpi

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
LENET = ROOT / "tests" / "fixtures" / "caffe2" / "lenet"

MODULES = {
    "onednn": ("cffi",),
    "plot": ("matplotlib",),
    "mpi": ("mpi4py",),
    "telemetry": ("opentelemetry",),
    "lmdb": ("lmdb",),
    "safetensors": ("safetensors",),
    "examples": ("sklearn",),
    "cuda12": ("cupy", "cudnn"),
    "test": ("pytest", "hypothesis", "trio", "onnxruntime", "starlette", "uvicorn", "httpx", "mypy"),
    "bench": ("openvino",),
}
"""What each extra is imported as."""

SMALLER = {"--epochs": "1", "--seconds": "1", "--seeds": "2", "--repeat": "2"}
INSTEAD = {
    "MODEL": "zoo:lenet", "TASK|SCRIPT.py": "lenet_digits", "DIR": "run", "N": "0", "NAME": "Conv",
    "SUITE": "taskbench:fft", "PATTERN": "fft",
}  # fmt: skip


def blocked() -> tuple[str, ...]:
    """Modules that the rule of `make compare` does not install."""
    rule = re.search(r"/\.installed:.*\n.*-e '\.\[([a-z0-9,]+)\]'", (ROOT / "Makefile").read_text())
    assert rule is not None
    installed = rule[1].split(",")
    return tuple(name for extra, names in MODULES.items() if extra not in installed for name in names)


def program() -> str:
    """`dagexec` in an environment without those modules."""
    return f"import sys\nsys.modules.update(dict.fromkeys({blocked()}))\nfrom dagexec.cli import main\nmain()"


def blocks(language: str) -> list[str]:
    """The README's blocks of code in `language`; "" for those that name none."""
    found = re.findall(r"^```(\w*)\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
    return [text for named, text in found if named == language]


def commands() -> list[str]:
    """The lines of the README that begin with `dagexec` or `mpiexec`, without what is said of them."""
    lines = [line.partition("  #")[0].strip() for block in blocks("") for line in block.splitlines()]
    return [line for line in lines if line.startswith(("dagexec ", "mpiexec "))]


def words(line: str) -> list[str]:
    """A synopsis as somebody would type it: all options, the first of alternatives, a model and small counts."""
    line = line.replace("cuda:0", "sim:0")  # a GPU is not asked for here
    for shown, typed in INSTEAD.items():
        line = re.sub(rf"(?<![\w-]){re.escape(shown)}(?![\w|])", typed, line)
    line = re.sub(r" \|[^\]]*", "", line)
    found = shlex.split(re.sub(r"[\[\]]", "", line))
    for option, value in SMALLER.items():
        if option in found:
            found[found.index(option) + 1] = value
        elif option == "--epochs" and "train" in found:
            found += [option, value]
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where the commands run, with the files that they read."""
    np.savez(tmp_path / "in.npz", data=np.zeros((1, 1, 28, 28), np.float32))
    for name in ("init_net.pb", "predict_net.pb"):
        shutil.copy(LENET / name, tmp_path)
    return tmp_path


def test_the_readme_shows_every_command() -> None:
    shown = {words(line)[1] for line in commands() if line.startswith("dagexec")}
    listed = subprocess.run(
        [sys.executable, "-c", program(), "--help"], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert shown == set(re.findall(r"^│ ([a-z]+) ", listed.stdout.partition("Commands")[2], re.MULTILINE))


def parameters() -> list[object]:
    """The comparison, which a user meets first, always runs; of the other commands those whose turn it is.

    A server runs until it is told to end (tests/cli/test_cli_serve.py).
    """
    return [
        line if line.startswith("dagexec compare") else pytest.param(line, marks=pytest.mark.slow)
        for line in commands()
        if not line.startswith("dagexec serve")
    ]


@pytest.mark.parametrize("line", parameters())
def test_a_command_of_the_readme_runs(line: str, folder: Path) -> None:
    typed = words(line)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    if typed[0] == "mpiexec":
        assert typed[:4] == ["mpiexec", "-n", "2", "dagexec"]
        status, _, err = mpi.run(2, "-c", program(), *typed[4:])
    else:
        ran = subprocess.run(
            [sys.executable, "-c", program(), *typed[1:]], cwd=folder, env=environment, capture_output=True, text=True
        )
        status, err = ran.returncode, ran.stderr
    assert status == 0, err
    for option in ("--output", "--trace", "--plot", "--draw", "--checkpoint"):
        if option in typed:
            assert (folder / typed[typed.index(option) + 1]).exists()


def test_the_snippet_in_caffe2s_way_runs(folder: Path) -> None:
    [snippet] = [block for block in blocks("python") if "Workspace" in block]
    code = (
        f"import sys\nsys.modules.update(dict.fromkeys({blocked()}))\nimport dagexec, numpy\n"
        f"array = numpy.zeros((1, 1, 28, 28), numpy.float32)\n{snippet}\n"
        "assert probabilities.shape == (1, 10) and abs(probabilities.sum() - 1) < 1e-5"
    )
    subprocess.run([sys.executable, "-c", code], cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True)
