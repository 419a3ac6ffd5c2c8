"""Reports of benchmarks: what they found, behind what they ran on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dagexec.analysis.environment import LIMITS
from dagexec.analysis.environment import environment as describe

__all__ = ["LIMITS", "describe", "write_report"]


def write_report(path: Path, **found: Any) -> None:
    """Write what a benchmark found as JSON, behind what it ran on."""
    path.write_text(json.dumps({"environment": describe()} | found, indent=1) + "\n")
