"""Suites: task graphs under a name. A suite is a function in `SUITES`; files and folders of graphs are suites, too."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from dagexec.core.spelling import did_you_mean
from dagexec.errors import ModelFormatError, SettingError
from dagexec.lab.graph import WorkGraph
from dagexec.lab.patterns import PATTERNS, Bench, bench_graph
from dagexec.lab.random_wired import MODELS, random_wired
from dagexec.lab.stg import read_stg
from dagexec.lab.wfformat import read_wfformat
from dagexec.platform.files import reason

Suite = Callable[[Bench], Iterable[WorkGraph]]
"""The graphs of a suite; those of Task Bench's patterns are of the given size."""

READERS: dict[str, Callable[[Path], WorkGraph]] = {".stg": read_stg, ".json": read_wfformat}

SUITES: dict[str, Suite] = {
    "taskbench": lambda bench: (bench_graph(pattern, bench) for pattern in PATTERNS),
    "randwire": lambda bench: (random_wired(model, bench.seed + number) for model in MODELS for number in range(2)),
}


def suite_graphs(suite: str, bench: Bench) -> Iterator[WorkGraph]:
    """The graphs of a suite of `SUITES`, of `taskbench:PATTERN`, a file, or all files of a folder, one by one.

    Raises SettingError for what is none of these, and what the readers raise.
    """
    name, _, pattern = suite.partition(":")
    if suite in SUITES:
        yield from SUITES[suite](bench)
    elif name == "taskbench":
        yield bench_graph(pattern, bench)
    else:
        for path in _files(Path(suite)):
            yield replace(READERS[path.suffix](path), name=path.stem)


def _files(path: Path) -> list[Path]:
    if path.is_dir():
        try:
            found = sorted(one for one in path.iterdir() if one.suffix in READERS)
        except OSError as error:
            raise ModelFormatError(f"{path}: cannot be read: {reason(error)}") from None
    else:
        found = [path] if path.suffix in READERS else []
    if not found:
        raise SettingError(
            f"suite {str(path)!r}: expected {', '.join(SUITES)}, taskbench:PATTERN, or a file or folder of "
            f"{' and '.join(READERS)}{did_you_mean(str(path), SUITES)}"
        )
    return found
