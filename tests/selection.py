"""Which tests run: all, or those that `make test` has time for.

Tests marked `slow` take more than 0.4 s, or are some of very many that repeat the same logic. `--part` says how many
of them run: "all", or one part of PARTS, by number. "commit" takes the number from the commit that is checked out: it
is the count of its ancestors, so PARTS commits one after another run every test. Of quick tests with more than MANY
cases, one case of QUICK_PARTS runs in the same manner. Which part a test is in follows from its name alone, so other
tests that come and go do not move it.

What was left out is said at the end.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import zlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

PARTS = 64
QUICK_PARTS, MANY = 8, 4
ROOT = Path(__file__).parent.parent
_LEFT_OUT = "left out"  # key of what a worker of xdist sends
_PART: pytest.StashKey[int | None] = pytest.StashKey()
_COUNTS: pytest.StashKey[Counter[str]] = pytest.StashKey()
_QUICK: pytest.StashKey[dict[str, int]] = pytest.StashKey()
"""How many quick cases a function has, by its node id."""


def part_of_commit(root: Path = ROOT) -> int:
    """The part that the commit in `root` runs."""
    return number_of_commit(root) % PARTS


def number_of_commit(root: Path = ROOT) -> int:
    """How many ancestors the commit in `root` has; without a history a number that follows from the files of tests."""
    count = _git(root, "rev-list", "--count", "HEAD")
    if count and _git(root, "rev-parse", "--is-shallow-repository") == "false":
        return int(count)
    digest = _git(root, "rev-parse", "HEAD") or _digest(root / "tests")
    return int(digest, 16)


def part_of_test(name: str) -> int:
    """The part that a slow test is in, by its node id."""
    return zlib.crc32(name.encode()) % PARTS


def part_of_case(name: str) -> int:
    """The part that a quick case is in, by its parameters: tests of one file share what a fixture makes for these."""
    return zlib.crc32(name.partition("[")[2].encode()) % QUICK_PARTS


def chosen_part(text: str) -> int | None:
    """What `--part` says as a number; None for all. Raises pytest.UsageError."""
    if text == "all":
        return None
    if text == "commit":
        return part_of_commit()
    if text.isdigit() and int(text) < PARTS:
        return int(text)
    raise pytest.UsageError(f"--part {text}: all, commit, or a number below {PARTS}")


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--part`."""
    wanted = os.environ.get("DAGEXEC_PART", "commit")
    parser.addoption(
        "--part", nargs="?", default="all", const=wanted, metavar="all|commit|N",
        help=f"of the tests marked slow: all (default), or one part of {PARTS}; with no value $DAGEXEC_PART or commit",
    )  # fmt: skip


def pytest_configure(config: pytest.Config) -> None:
    """Workers of xdist take the part that the process has found which starts them."""
    config.stash[_PART] = chosen_part(config.getoption("--part"))
    config.stash[_COUNTS] = Counter()
    config.stash[_QUICK] = {}


def pytest_report_header(config: pytest.Config) -> str | None:
    """Which part runs."""
    part = config.stash[_PART]
    if part is None:
        return None
    quick = f"one of {QUICK_PARTS} cases of quick ones that have more than {MANY}"
    return f"slow tests: part {part} of {PARTS}, and {quick}; make test-all runs all"


@pytest.hookimpl(trylast=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Leave out cases of other parts before pytest makes tests of them, which are three of four: that takes long.

    One stays, as no case is one without parameters; it is left out below.
    """
    part = metafunc.config.stash[_PART]
    calls = getattr(metafunc, "_calls", None)  # which have no public name
    if part is None or not calls:
        return
    name = metafunc.definition.nodeid
    is_slow = metafunc.definition.get_closest_marker("slow") is not None
    slow = [is_slow or any(mark.name == "slow" for mark in call.marks) for call in calls]
    quick = metafunc.config.stash[_QUICK][name] = slow.count(False)
    kept = [call for call, here in zip(calls, slow, strict=True) if _is_due(f"{name}[{call.id}]", here, quick, part)]
    if len(kept) < len(calls):
        kept = kept or calls[:1]
        metafunc.config.stash[_COUNTS][name.partition("::")[0]] += len(calls) - len(kept)
        calls[:] = kept


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out tests of other parts, and put files with slow ones first, for workers to end at the same time."""
    part = config.stash[_PART]
    if part is None:
        return
    heavy: Counter[Path] = Counter()
    kept, left_out = list[pytest.Item](), list[pytest.Item]()
    quick = config.stash[_QUICK]
    for item in items:
        is_slow = item.get_closest_marker("slow") is not None
        is_here = _is_due(item.nodeid, is_slow, quick.get(_function_of(item), 1), part)
        heavy[item.path] += is_slow and is_here
        (kept if is_here else left_out).append(item)
    items[:] = sorted(kept, key=lambda item: -heavy[item.path])
    config.hook.pytest_deselected(items=left_out)
    config.stash[_COUNTS].update(item.nodeid.partition("::")[0] for item in left_out)
    if hasattr(config, "workeroutput"):
        config.workeroutput[_LEFT_OUT] = dict(config.stash[_COUNTS])


def _is_due(name: str, is_slow: bool, quick: int, part: int) -> bool:
    """Whether a test, or one of so many quick cases, runs in a part."""
    if is_slow:
        return part_of_test(name) == part
    return quick <= MANY or part_of_case(name) == part % QUICK_PARTS


def _function_of(item: pytest.Item) -> str:
    return item.nodeid.partition("[")[0]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """What a worker left out: all of them collect all tests."""
    found = getattr(node, "workeroutput", {}).get(_LEFT_OUT)
    if found:
        node.config.stash[_COUNTS] = Counter(found)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say what was left out, by file."""
    counts = config.stash[_COUNTS]
    if counts:
        terminalreporter.write_line(left_out(counts, config.stash[_PART]))


def left_out(counts: Counter[str], part: int | None) -> str:
    """What is said of so many tests left out, by file."""
    files = ", ".join(f"{name.removeprefix('tests/')} {count}" for name, count in sorted(counts.items()))
    return (
        f"part {part} of {PARTS}: {counts.total()} tests of other parts were left out "
        f"(DAGEXEC_PART={part} make test repeats this, make test-all runs all): {files}"
    )


def _git(root: Path, *arguments: str) -> str:
    """What git prints; "" where there is no git, or nothing that it knows."""
    try:
        done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip()


def _digest(folder: Path) -> str:
    """Of the names and contents of the Python files in a folder."""
    found = hashlib.sha256()
    for path in _sorted(folder):
        found.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes())
    return found.hexdigest()


def _sorted(folder: Path) -> Sequence[Path]:
    return sorted(folder.rglob("*.py"))
