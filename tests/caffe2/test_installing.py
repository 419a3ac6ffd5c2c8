"""`caffe2.python` as a name of dagexec.caffe2: only where it is asked for, and where there is no Caffe2."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dagexec.caffe2.__main__ import USAGE

pytestmark = pytest.mark.slow  # each test starts a process
ROOT = Path(__file__).resolve().parents[2]

SCRIPT = """
import sys

from caffe2.proto import caffe2_pb2
from caffe2.python import core, workspace
import caffe2.python.workspace as again
import dagexec.caffe2.workspace

assert again is workspace is dagexec.caffe2.workspace
assert workspace.__spec__.name == workspace.__name__ == "dagexec.caffe2.workspace"
assert isinstance(core.Net("n").Proto(), caffe2_pb2.NetDef)
import neighbor
try:
    from caffe2.python import nowhere
except ImportError:
    print("arguments", sys.argv[1:], neighbor.VALUE, __name__)
"""


def python(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True)


def test_a_script_runs_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "script.py").write_text(SCRIPT)
    (tmp_path / "scripts" / "neighbor.py").write_text("VALUE = 3")
    done = python("-m", "dagexec.caffe2", "scripts/script.py", "--a", "b", folder=tmp_path)
    assert (done.returncode, done.stdout) == (0, "arguments ['--a', 'b'] 3 __main__\n"), done.stderr


def test_nothing_is_there_unless_asked_for_and_all_is_taken_back(tmp_path: Path) -> None:
    code = """
import dagexec.caffe2
def there():
    try:
        import caffe2.python
    except ImportError:
        return False
    return True
found = [there()]
dagexec.caffe2.install()
dagexec.caffe2.install()
found.append(there())
dagexec.caffe2.uninstall()
found.append(there())
assert found == [False, True, False], found
"""
    done = python("-c", code, folder=tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("imported", ["", "import caffe2; "])
def test_a_caffe2_that_is_installed_stays(imported: str, tmp_path: Path) -> None:
    (tmp_path / "caffe2").mkdir()
    (tmp_path / "caffe2" / "__init__.py").write_text("")
    done = python("-c", f"{imported}import dagexec.caffe2; dagexec.caffe2.install()", folder=tmp_path)
    assert "Caffe2Error: a package called caffe2 is installed here" in done.stderr


def test_without_a_script_the_usage_is_shown(tmp_path: Path) -> None:
    done = python("-m", "dagexec.caffe2", folder=tmp_path)
    assert (done.returncode, done.stderr) == (1, f"{USAGE}\n")
