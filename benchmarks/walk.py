"""How long the way from a model to its first result is in code: calls, files, and changes of file.

    python benchmarks/walk.py [--as NAME] [--json benchmarks/results/walk.json] [MODEL...]

A MODEL is a name of the zoo (`zoo:squeezenet`), or a file of a model whose inputs are float32. Each is compiled without
tuning and run once, in a process of its own with an empty cache, after another model: what is done once a process is
not counted. Counted are calls of dagexec's Python functions in the calling thread, again each time a generator goes on,
and among them those that come from another file. Unlike times, these numbers are the same each time. NAME says under
which key the report has them, so that one file holds what was and what is.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

T = TypeVar("T")
ROOT = Path(__file__).resolve().parent.parent
PACKAGE = tuple(os.fspath(ROOT / folder) + os.sep for folder in ("dagexec", "ops", "scheduler"))
DEFAULT = ("zoo:squeezenet", "zoo:lenet", "zoo:nasnet_a")
BUSIEST = 12


def counted(call: Callable[[], T]) -> tuple[T, dict[str, Any]]:
    """The result of `call`, and what this thread did in it."""
    calls: Counter[str] = Counter()
    changes = 0

    def note(frame: FrameType, event: str, argument: object) -> None:
        nonlocal changes
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(PACKAGE):
            calls[file] += 1
            changes += frame.f_back is None or frame.f_back.f_code.co_filename != file

    sys.setprofile(note)
    try:
        result = call()
    finally:
        sys.setprofile(None)
    busiest = {os.path.relpath(file, ROOT): count for file, count in calls.most_common(BUSIEST)}
    return result, {"calls": calls.total(), "files": len(calls), "changes of file": changes, "busiest files": busiest}


def child(source: str) -> None:
    """Print the counts of one model as JSON."""
    import numpy as np

    import dagexec
    from dagexec.executor.source.loading import load_model

    warm = dagexec.compile("zoo:lenet", tuning_seconds=0)
    warm.run({"data": np.zeros((1, 1, 28, 28), np.float32)})
    model, loading = counted(lambda: load_model(source))
    executor, compiling = counted(lambda: dagexec.compile(model, tuning_seconds=0))
    feeds = {name: np.ones([size or 1 for size in info.shape or ()], np.float32) for name, info in model.inputs.items()}
    running = counted(lambda: executor.run(feeds))[1]
    print(json.dumps({"load": loading, "compile": compiling, "first run": running}))
    sys.stdout.flush()
    os._exit(0)  # what is made need not be taken down


def main() -> None:
    options = _arguments()
    if options.child:
        child(options.child)
        return
    report = json.loads(options.json.read_text()) if options.json.exists() else {}
    rows = report.setdefault(options.key, {})
    for source in options.models:
        command = [sys.executable, __file__, "--child", source]
        done = subprocess.run(
            command, env=os.environ | {"DAGEXEC_CHOICES": "off"}, stdout=subprocess.PIPE, check=True, text=True
        )
        rows[source.rpartition("/")[2]] = found = json.loads(done.stdout.splitlines()[-1])
        for stage, row in found.items():
            print(f"{source} {stage}: {row['calls']} calls in {row['files']} files, {row['changes of file']} changes")
    options.json.write_text(json.dumps(report, indent=1) + "\n")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=DEFAULT, metavar="MODEL")
    parser.add_argument("--as", dest="key", default="now", metavar="NAME")
    parser.add_argument("--json", type=Path, default=ROOT / "benchmarks" / "results" / "walk.json")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
