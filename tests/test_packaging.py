"""The wheel, the source distribution and the import rules, as a user gets them, and what a release makes of them."""

import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from packaging.metadata import Metadata

ROOT = Path(__file__).parent.parent
VERSION = "7.8.9"

PROGRAM = """
import platform
import sys
import numpy as np
import dagexec
import dagexec.ops.families.activation.functions, dagexec.scheduler.nets.dag

assert dagexec.__version__ == sys.argv[1], dagexec.__version__
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
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What is here, as a repository with one commit, which is tagged."""
    folder = tmp_path_factory.mktemp("checkout") / "dagexec"
    left_out = shutil.ignore_patterns(
        ".git", ".venv*", ".*_cache", ".hypothesis", "__pycache__", "build", "dist", "_version.py"
    )
    shutil.copytree(ROOT, folder, symlinks=True, ignore=left_out)
    git(folder, "init", "--quiet")
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message", "All")
    git(folder, "tag", f"v{VERSION}")
    return folder


def git(folder: Path, *words: str) -> str:
    """What git says in `folder`."""
    author = ("-c", "user.name=A", "-c", "user.email=a@example.org")
    return subprocess.run(["git", *author, *words], cwd=folder, check=True, capture_output=True, text=True).stdout


def built(source: Path, folder: Path, *options: str, **environment: str) -> Path:
    """`folder`, with what is built from `source`."""
    command = [sys.executable, "-m", "build", "--no-isolation", *options, "--outdir", folder, source]
    subprocess.run(command, env=os.environ | environment, check=True, capture_output=True)
    return folder


@pytest.fixture(scope="module")
def distributions(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the source distribution and the wheel built from it."""
    return built(checkout, tmp_path_factory.mktemp("dist"))


def pythons() -> list[str]:
    """This Python, or the one that `make test-wheel` names, and all others that are here and supported."""
    named = os.environ.get("DAGEXEC_WHEEL_PYTHON")
    if named:
        return [named]
    found = [f"python3.{minor}" for minor in range(11, 15) if minor != sys.version_info.minor]
    return [sys.executable, *(one for one in found if shutil.which(one))]


@pytest.mark.slow
@pytest.mark.parametrize("used", pythons())
def test_the_wheel_runs_a_net_in_a_fresh_environment(distributions: Path, tmp_path: Path, used: str) -> None:
    [wheel] = distributions.glob("*.whl")
    if subprocess.run([used, "-c", ""], capture_output=True, check=False).returncode:
        pytest.skip(f"{used} is but a name here")
    subprocess.run([used, "-m", "venv", "--without-pip", tmp_path / "env"], check=True, capture_output=True)
    python = tmp_path / "env" / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-compile", wheel]
    subprocess.run(install, check=True, capture_output=True)
    # -I: what PYTHONPATH names must not stand in for the wheel
    command = [python, "-I", "-c", PROGRAM, VERSION]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    names, total = result.stdout.rsplit(" ", 1)
    assert names == "['softmax']"
    assert float(total) == pytest.approx(1.0, abs=1e-5)
    script = subprocess.run(
        [tmp_path / "env" / "bin" / "dagexec", "operators"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert "Conv " in script.stdout


@pytest.mark.slow
def test_pipx_runs_a_comparison_without_an_installation(distributions: Path, tmp_path: Path) -> None:
    [wheel] = distributions.glob("*.whl")
    places = {"PIPX_HOME": str(tmp_path / "home"), "PIPX_BIN_DIR": str(tmp_path / "bin"), "USE_EMOJI": "0"}
    words = ["compare", "zoo:squeezenet", "--net-type", "dag", "--num-workers", "2", "--repeat", "3", "--json"]
    chosen = ["--spec", wheel, "--python", sys.executable, "--pip-args=--no-compile"]
    command = [sys.executable, "-m", "pipx", "run", *chosen, "dagexec", *words]
    result = subprocess.run(command, cwd=tmp_path, env=os.environ | places, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    compared = json.loads(result.stdout)
    assert [(row["net_type"], row["workers"]) for row in compared["rows"]] == [("simple", 1), ("dag", 2)]


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
    expected.add("dagexec/platform/_version.py")
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
def test_a_tag_is_the_version_of_what_is_built(distributions: Path) -> None:
    assert sorted(path.name for path in distributions.iterdir()) == [
        f"dagexec-{VERSION}-py3-none-any.whl",
        f"dagexec-{VERSION}.tar.gz",
    ]
    [wheel] = distributions.glob("*.whl")
    [source] = distributions.glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as archive, tarfile.open(source) as sources:
        information = sources.extractfile(f"dagexec-{VERSION}/PKG-INFO")
        assert information is not None
        texts = [archive.read(f"dagexec-{VERSION}.dist-info/METADATA"), information.read()]
    for text in texts:
        metadata = Metadata.from_email(text)  # raises for what a package index would refuse
        assert str(metadata.version) == VERSION
        assert metadata.description_content_type == "text/markdown"
        assert metadata.description == (ROOT / "README.md").read_text()
        assert metadata.license_files == ["LICENSE"]


@pytest.mark.slow
def test_sources_without_a_history_are_built(checkout: Path, tmp_path: Path) -> None:
    """An archive of a commit names its tag; what an image is built from has neither, and is told."""
    archive, image = tmp_path / "archive", tmp_path / "image"
    git(checkout, "archive", "--prefix=archive/", "--output", str(tmp_path / "it.tar"), "HEAD")
    with tarfile.open(tmp_path / "it.tar") as sources:
        sources.extractall(tmp_path, filter="tar")
    for line in (ROOT / "deploy" / "Dockerfile.dockerignore").read_text().splitlines():
        if line.startswith("!"):
            target = image / line[1:]
            target.parent.mkdir(parents=True, exist_ok=True)
            (shutil.copytree if (archive / line[1:]).is_dir() else shutil.copy)(archive / line[1:], target)
    folder = tmp_path / "dist"
    built(archive, folder, "--wheel")
    built(image, folder, "--wheel")
    built(image, folder, "--wheel", SETUPTOOLS_SCM_PRETEND_VERSION="0.2.0")
    versions = sorted(path.name.split("-")[1] for path in folder.iterdir())
    assert versions == ["0.0.0", "0.2.0", VERSION]


@pytest.mark.slow
def test_a_release_gathers_the_fragments_of_the_changelog(checkout: Path, tmp_path: Path) -> None:
    folder = tmp_path / "clone"
    git(tmp_path, "clone", "--quiet", str(checkout), str(folder))
    (folder / "changelog.d" / "+one.fixed.md").write_text("What was wrong is right.\n")
    git(folder, "add", "--all")
    fragments = [path for path in (folder / "changelog.d").iterdir() if path.name != "README.md"]
    texts = [path.read_text().strip() for path in fragments]
    before = (folder / "CHANGELOG.md").read_text()
    command = [sys.executable, "-m", "towncrier", "build", "--yes", "--version", VERSION]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    after = (folder / "CHANGELOG.md").read_text()
    head, _, rest = before.partition("<!-- releases -->\n")
    assert after.startswith(f"{head}<!-- releases -->\n\n## {VERSION} - ")
    assert after.endswith(rest)
    section = after.removesuffix(rest)
    assert "### Fixed\n\n- What was wrong is right.\n" in section
    assert all(" ".join(text.split()) in " ".join(section.split()) for text in texts)
    assert not any(path.exists() for path in fragments)


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
