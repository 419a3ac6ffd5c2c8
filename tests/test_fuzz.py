"""The fuzzer finds what it is there for, does the same case again from its number, and its seeds are whole."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx
import pytest

import dagexec
from dagexec.errors import DagexecError, ShapeError
from tests.fuzz import worker
from tests.fuzz.case import Cases
from tests.fuzz.damage import damaged_bytes, damaged_json, damaged_zip
from tests.fuzz.messages import Vocabulary, damage_message
from tests.fuzz.near import WrongError, require_near
from tests.fuzz.runner import run_cases
from tests.fuzz.seeds import Seed, make_seeds

SEED = Seed("minidb", "records", "x.minidb", {"x.minidb": bytes(64)})


def _raise(error: BaseException) -> str:
    raise error


def _signal() -> str:
    os.kill(os.getpid(), signal.SIGSEGV)
    return ""


def _spin() -> str:
    while True:
        pass


def _take_memory() -> str:
    return str(len(bytearray(1 << 40)))


def _write() -> str:
    Path("written").touch()
    return ""


PLANTED: dict[str, tuple[Callable[[], str], str, str]] = {
    "taken": (lambda: "done", "ok", "done"),
    "refused": (lambda: _raise(ShapeError("no")), "error", "ShapeError"),
    "another error": (lambda: _raise(KeyError("x")), "traceback", "KeyError"),
    "another result": (lambda: _raise(WrongError("x")), "wrong", "WrongError"),
    "a crash": (_signal, "signal", "SIGSEGV"),
    "an end": (lambda: os._exit(3), "signal", "exit 3"),
    "no end": (_spin, "time", "0.2 s"),
    "a wait": (lambda: str(signal.pause()), "time", "0.2 s"),
    "too much memory": (_take_memory, "memory", "MemoryError"),
    "a file left behind": (_write, "wrote", "written"),
}


@pytest.fixture(scope="module")
def seeds() -> list[Seed]:
    return make_seeds(with_suite=False)


@pytest.mark.slow
@pytest.mark.parametrize("planted", PLANTED)
def test_each_outcome_is_told_from_the_others_and_the_next_case_is_done(
    planted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    does, word, detail = PLANTED[planted]
    first = random.Random("use 0").random()  # what draws how the files of case 0 are used

    def use(_kind: object, _path: object, _feeds: object, rng: random.Random, _phase: object) -> str:
        return does() if rng.random() == first else "after"

    monkeypatch.setattr(worker, "use", use)
    summary = run_cases(Cases([SEED], ["minidb"]), [0, 1], seconds=0.2)
    assert summary.counts == {("minidb", word, detail): 1, ("minidb", "ok", "after"): 1}
    assert [failure.number for failure in summary.failures] == ([] if word in ("ok", "error") else [0])
    assert summary.workers == (2 if word in ("signal", "time") else 1)


@pytest.mark.slow
def test_a_case_is_the_same_whenever_it_is_drawn(seeds: list[Seed]) -> None:
    one, other = Cases(seeds), Cases(seeds)
    drawn = [one.case(number) for number in range(200)]
    for number, case in enumerate(drawn):
        assert case.files == other.case(number).files
    assert {case.seed.kind for case in drawn} == {seed.kind for seed in seeds}


@pytest.mark.slow
def test_most_cases_differ_from_their_seed(seeds: list[Seed]) -> None:
    cases = Cases(seeds)
    drawn = [cases.case(number) for number in range(100)]
    assert sum(case.files != case.seed.files for case in drawn) > 90


def test_changes_reach_every_field_of_a_message() -> None:
    before = onnx.parser.parse_node("y = Conv <pads = [1, 1]> (x, w)")
    vocabulary = Vocabulary([before])
    changed = set()
    for number in range(1500):
        message = onnx.NodeProto.FromString(before.SerializeToString())
        damage_message(random.Random(number), message, vocabulary)
        changed |= {
            field.name
            for field in onnx.NodeProto.DESCRIPTOR.fields
            if getattr(message, field.name) != getattr(before, field.name)
        }
    assert changed == {field.name for field in onnx.NodeProto.DESCRIPTOR.fields}


@pytest.mark.parametrize(
    "damage", [damaged_bytes, damaged_zip, lambda rng, content: damaged_json(rng, {"a": [content]})]
)
def test_content_that_is_nothing_any_more_can_be_damaged_again(
    damage: Callable[[random.Random, bytes], object],
) -> None:
    for content in (b"", b"PK", b"{"):
        for number in range(50):
            damage(random.Random(number), content)


def test_results_that_differ_are_told() -> None:
    plain: npt.NDArray[np.float32] = np.array([1.0, 2.0], np.float32)
    require_near("y", plain, plain * np.float32(1.001))
    for other in (plain * 2, plain[:1], plain.astype(np.float64), np.array([1, np.inf], np.float32)):
        with pytest.raises(WrongError):
            require_near("y", plain, other)


@pytest.mark.slow
def test_what_is_damaged_is_taken_while_it_is_whole() -> None:
    """In a process without threads of libraries, which would not outlive the forks."""
    found = subprocess.run([sys.executable, "-m", "tests.fuzz", "--whole"], capture_output=True, text=True, check=False)
    counts = {word: int(count) for word, count in re.findall(r"(\w+) (\d+)(?:,|$)", found.stdout)}
    assert found.returncode == 0, found.stdout + found.stderr
    assert counts["ok"] > 0.9 * sum(counts.values())


@pytest.mark.parametrize(
    "folder", sorted((Path(__file__).parent / "fuzz" / "regressions").iterdir()), ids=lambda path: path.name
)
def test_a_file_that_once_failed_is_taken_or_refused(folder: Path) -> None:
    """It is compiled: what the file asks for is not fed here."""
    [path] = folder.iterdir()
    with suppress(DagexecError), dagexec.compile(path) as executor:
        assert executor.outputs
