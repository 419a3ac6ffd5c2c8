"""A benchmark's record that grows row by row, each with the commit that it was measured at."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parent.parent
_SOURCES = ("dagexec", "ops", "scheduler")


def source_commit() -> str | None:
    """The last commit that changed what is measured; None where there is no repository or it is changed."""
    git = ["git", "-C", os.fspath(_ROOT)]
    found = subprocess.run([*git, "log", "-1", "--format=%h", "--", *_SOURCES], capture_output=True, text=True)
    changed = subprocess.run([*git, "status", "--porcelain", "--", *_SOURCES], capture_output=True, text=True)
    return None if found.returncode or changed.stdout else found.stdout.strip() or None


def read_record(file: Path) -> dict[str, Any]:
    """What was measured before; nothing where there is no such file."""
    found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    return found


def write_record(file: Path, reports: Mapping[str, Any]) -> None:
    """Replace the record at once: whoever ends the process leaves a whole one."""
    fresh = file.with_suffix(".part")
    fresh.write_text(json.dumps(reports, indent=1) + "\n")
    fresh.replace(file)
