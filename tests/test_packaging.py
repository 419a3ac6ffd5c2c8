"""The wheel, the source distribution and the import rules, as a user gets them."""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

PROGRAM = """
import platform
import sys
import numpy as np
import dagexec
import dagexec.ops.families.activation.functions, dagexec.scheduler.nets.dag

assert "site-packages" in dagexec.__file__ and "site-packages" in dagexec.ops.__file__, dagexec.ops.__file__
for taken in ("ops", "scheduler", "tests"):
    try:
        __import__(taken)
    except ModuleNotFoundError:
        continue
    sys.exit(f"the wheel claims the top-level name {taken}")
with dagexec.compile("zoo:lenet", net_type="async_dag") as executor:
    name, info = next(iter(executor.inputs.items()))
    outputs = executor.run({name: np.zeros([size or 1 for size in info.shape], np.float32)})
engines = {operator.engine for operator in executor.model.net.op}
fast = sys.platform == "linux" and platform.machine() == "x86_64"
assert ("ONEDNN" in engines) is fast, engines  # without any extra
print(sorted(outputs), float(sum(array.sum() for array in outputs.values())))
"""


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the source distribution and the wheel built from it."""
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run([sys.executable, "-m", "build", "--outdir", folder, ROOT], check=True, capture_output=True)
    return folder


def pythons() -> list[str]:
    """This Python, or the one that `make test-wheel` names, and all others that are here and supported."""
    named = os.environ.get("DAGEXEC_WHEEL_PYTHON")
    if named:
        return [named]
    found = [f"python3.{minor}" for minor in range(11, 15) if minor != sys.version_info.minor]
    return [sys.executable, *(one for one in found if runs(one))]


def runs(python: str) -> bool:
    """Whether there is such a Python, and not only its name."""
    if shutil.which(python) is None:
        return False
    return subprocess.run([python, "-c", ""], capture_output=True, check=False).returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize("used", pythons())
def test_the_wheel_runs_a_net_in_a_fresh_environment(distributions: Path, tmp_path: Path, used: str) -> None:
    [wheel] = distributions.glob("*.whl")
    subprocess.run([used, "-m", "venv", "--without-pip", tmp_path / "env"], check=True, capture_output=True)
    python = tmp_path / "env" / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-compile", wheel]
    subprocess.run(install, check=True, capture_output=True)
    # -I: what PYTHONPATH names must not stand in for the wheel
    result = subprocess.run([python, "-I", "-c", PROGRAM], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    names, total = result.stdout.rsplit(" ", 1)
    assert names == "['softmax']"
    assert float(total) == pytest.approx(1.0, abs=1e-5)
    script = subprocess.run(
        [tmp_path / "env" / "bin" / "dagexec", "operators"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert "Conv " in script.stdout


@pytest.mark.slow
def test_wheel_and_checkout_hold_the_same_modules(distributions: Path) -> None:
    [wheel] = distributions.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        installed = {name for name in archive.namelist() if name.startswith("dagexec/")}
    expected = {
        f"{place}/{path.relative_to(ROOT / folder)}"
        for folder, place in (("dagexec", "dagexec"), ("ops", "dagexec/ops"), ("scheduler", "dagexec/scheduler"))
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".py", ".pyi", ".typed", ".proto") and "__pycache__" not in path.parts
    }
    assert expected - installed == set()
    assert "dagexec/py.typed" in installed
    assert {name for name in installed if name.endswith(".py")} <= expected


@pytest.mark.slow
def test_the_source_distribution_has_the_tests_and_documents(distributions: Path) -> None:
    [source] = distributions.glob("*.tar.gz")
    with tarfile.open(source) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"README.md", "CHANGELOG.md", "Makefile", "tests/test_packaging.py", "docs/architecture.md"} <= names


@pytest.mark.slow
def test_mypy_finds_the_types_through_the_installed_package(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import dagexec\nfrom dagexec.ops.families.conv.convolution import Convolution\n"
        "from dagexec.scheduler.run.pool import WorkerPool\n"
        "reveal_type(dagexec.Workspace().blobs())\nreveal_type(WorkerPool)\nreveal_type(Convolution)\n"
    )
    result = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", program], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout
    for revealed in (
        "list[",
        "-> dagexec.scheduler.run.pool.WorkerPool",
        "-> dagexec.ops.families.conv.convolution.Convolution",
    ):
        assert revealed in result.stdout
