"""What a shell offers to complete a word: names of the zoo and files, tasks, operators, net types."""

from __future__ import annotations

import glob
from collections.abc import Iterable
from pathlib import Path

import dagexec  # noqa: F401 - registers the operators
from dagexec import zoo
from dagexec.compiler.passes.own import PLUGINS as PASSES
from dagexec.core.registry import registered_operators
from dagexec.scheduling import policy_names
from dagexec.zoo import tasks

_NET_TYPES = ("simple", "dag", "async_dag")


def complete_model(incomplete: str) -> list[str]:
    """Bundled architectures, files and folders."""
    paths = (f"{path}/" if Path(path).is_dir() else path for path in glob.glob(f"{glob.escape(incomplete)}*"))
    return [*_starting(incomplete, (f"zoo:{name}" for name in zoo.names())), *sorted(paths)]


def complete_task(incomplete: str) -> list[str]:
    """Bundled tasks."""
    return _starting(incomplete, tasks.names())


def complete_operator(incomplete: str) -> list[str]:
    """Operator types."""
    return _starting(incomplete, registered_operators())


def complete_net_type(incomplete: str) -> list[str]:
    """Kinds of nets."""
    return _starting(incomplete, _NET_TYPES)


def complete_pass(incomplete: str) -> list[str]:
    """Passes of installed packages."""
    return _starting(incomplete, PASSES.names())


def complete_policy(incomplete: str) -> list[str]:
    """Policies; of names separated by commas, the last."""
    before, comma, last = incomplete.rpartition(",")
    return [f"{before}{comma}{name}" for name in _starting(last, policy_names())]


def _starting(incomplete: str, words: Iterable[str]) -> list[str]:
    return [word for word in words if word.startswith(incomplete)]
