"""Control groups: the folders in which Linux says what this process may use, and how much memory is left there.

Version 2 is one tree with all controllers, version 1 a tree for each; many systems mount both, and inside a container
the tree's root may be the container's own group. Every group from the process's own up to the root bounds it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_UNIFIED = "unified"  # where version 2 is mounted beside version 1
_MEMBERSHIP = Path("/proc/self/cgroup")


def control_groups(controller: str) -> Iterator[Path]:
    """The folders of the groups that bound this process in what `controller` ("cpu", "memory") controls.

    Some may not exist. Roots come first.
    """
    yield _ROOT
    yield _ROOT / controller
    try:
        lines = _MEMBERSHIP.read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return
    for line in lines:
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers and controller not in controllers.split(","):
            continue
        group = Path(path.lstrip("/"))
        for root in (_ROOT / controllers,) if controllers else (_ROOT, _ROOT / _UNIFIED):
            yield from (root / part for part in (group, *group.parents) if ".." not in part.parts)


def memory_limit(folder: Path) -> int | None:
    """The bytes that the group of this folder may use; None without a limit."""
    for name in ("memory.max", "memory.limit_in_bytes"):
        limit = _number(folder / name)
        if limit is not None:
            return limit
    return None


def memory_left(folder: Path, limit: int) -> int | None:
    """Bytes that the group may still use; None if unknown.

    Pages of files count as free: the system drops them before it kills a process. Swap does not count.
    """
    for usage, prefix in (("memory.current", ""), ("memory.usage_in_bytes", "total_")):
        used = _number(folder / usage)
        if used is not None:
            return max(0, limit - used + _file_bytes(folder, prefix))
    return None


def _file_bytes(folder: Path, prefix: str) -> int:
    """Bytes of a group's pages that are copies of files."""
    total = 0
    try:
        for line in (folder / "memory.stat").read_text().splitlines():
            name, _, value = line.partition(" ")
            if name in (f"{prefix}active_file", f"{prefix}inactive_file"):
                total += int(value)
    except (OSError, ValueError):
        return 0
    return total


def _number(file: Path) -> int | None:
    try:
        return int(file.read_text())
    except (OSError, ValueError):  # no file, "max", or another file
        return None
