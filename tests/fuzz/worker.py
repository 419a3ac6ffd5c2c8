"""A process that does cases one after another, within limits, and says of each what came of it.

It is forked from one that has made the seeds and imported everything, and that never called a library's threads. The
lines it writes: `B number` before a case, `P phase`, and `E {...}` with the outcome.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import random
import resource
import shutil
import signal
import sys
import traceback
import warnings
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from dagexec.errors import DagexecError, OperatorError
from tests.fuzz.case import Case, Cases
from tests.fuzz.near import WrongError
from tests.fuzz.use import Phase, use

MEMORY_BYTES = 2 << 30
"""Address space that a worker may take beyond what it has when it starts."""

_MAX_KEPT = 400 << 20  # bytes that a worker may have taken for good before another takes its place
_MAX_CASES = 3000


@dataclass(frozen=True)
class Outcome:
    """What came of a case.

    Attributes:
        number: the case's.
        kind: what was damaged.
        word: `ok`, `error` (a DagexecError), or a failure: `traceback`, `wrong`, `wrote`, `memory`, `signal`, `time`.
        detail: for `ok` what was done; else the class of the error, or the signal.
        place: of a failure, where in dagexec it came from.
        text: the message, of a failure with the traceback.
    """

    number: int
    kind: str
    word: str
    detail: str = ""
    place: str = ""
    text: str = ""

    @property
    def is_failure(self) -> bool:
        """True unless the file was taken, or refused in the way that is promised."""
        return self.word not in ("ok", "error")


def serve(cases: Cases, numbers: Iterable[int], write: int, folder: Path, memory_bytes: int) -> None:
    """Do the cases of `numbers`, writing to the descriptor `write`, until they are done or too much memory is held."""
    _limit(memory_bytes)
    start = _resident()
    for done, number in enumerate(numbers):
        case = cases.case(number)
        _say(write, f"B {number} {case.seed.kind}")
        outcome = _outcome(case, folder, lambda phase: _say(write, f"P {phase}"))
        _say(write, "E " + json.dumps(asdict(outcome)))
        if done >= _MAX_CASES or _resident() - start > _MAX_KEPT:
            return


def _limit(memory_bytes: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (_pages(0) + memory_bytes, hard))
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")


def _pages(field: int) -> int:
    return int(Path("/proc/self/statm").read_text().split()[field]) * resource.getpagesize()


def _resident() -> int:
    return _pages(1)


def _say(write: int, line: str) -> None:
    os.write(write, line.encode() + b"\n")


def _outcome(case: Case, folder: Path, phase: Phase) -> Outcome:
    """Do one case with its files below `folder`, the current one, from which all else is removed first."""
    number, kind = case.number, case.seed.kind
    _empty(folder)
    try:
        path = case.write(folder / "files")
    except (OSError, ValueError):  # a name that no file can have
        return Outcome(number, kind, "ok", "no such file")
    before = _names(folder)
    try:
        detail = use(kind, path, case.seed.feeds, random.Random(f"use {number}"), phase)
        outcome = Outcome(number, kind, "ok", detail)
    except DagexecError as error:
        outcome = Outcome(number, kind, "error", _class_of(error), text=str(error)[:300])
    except MemoryError as error:
        outcome = _failure(number, kind, "memory", error)
    except WrongError as error:
        outcome = _failure(number, kind, "wrong", error)
    except SystemExit as error:
        outcome = Outcome(number, kind, "ok", f"exit {error.code}")
    except BaseException as error:
        outcome = _failure(number, kind, "traceback", error)
    new = _names(folder) - before
    if new and not outcome.is_failure:
        return Outcome(number, kind, "wrote", ", ".join(sorted(os.path.relpath(name, folder) for name in new))[:200])
    return outcome


def _empty(folder: Path) -> None:
    for entry in os.scandir(folder):
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path, ignore_errors=True)
        else:
            os.unlink(entry.path)


def _names(folder: Path) -> set[str]:
    """The files in a folder and below, but for the one that lmdb makes when it reads."""
    return {
        os.path.join(place, name)
        for place, _, names in os.walk(folder)
        for name in names
        if name != "lock.mdb"
    }  # fmt: skip


def _class_of(error: DagexecError) -> str:
    """The error's class; of what an operator raised while it ran, with that."""
    name = type(error).__name__
    if isinstance(error, OperatorError) and error.__cause__ is not None:
        return f"{name} ({type(error.__cause__).__name__})"
    return name


def _failure(number: int, kind: str, word: str, error: BaseException) -> Outcome:
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "/tests/" not in frame.filename]
    place = f"{os.path.basename(frames[-1].filename)}:{frames[-1].name}" if frames else ""
    own = [frame for frame in frames if any(f"/{part}/" in frame.filename for part in ("dagexec", "ops", "scheduler"))]
    if own:
        parts = Path(own[-1].filename).parts[-2:]
        place = f"{'/'.join(parts)}:{own[-1].lineno} {own[-1].name}"
    text = "".join(traceback.format_exception(error))
    return Outcome(number, kind, word, type(error).__name__, place, text[-4000:])


def main_of_child(cases: Cases, numbers: Iterable[int], write: int, errors: Path, memory_bytes: int) -> None:
    """What a forked worker does: `serve` in a folder of its own, standard output and error in `errors`, then end."""
    status = 1
    folder = errors.with_suffix(".folder")
    try:
        with errors.open("wb") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115 - for as long as the process lives
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
        folder.mkdir(exist_ok=True)
        os.chdir(folder)
        serve(cases, numbers, write, folder, memory_bytes)
        status = 0
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(status)
