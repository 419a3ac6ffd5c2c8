"""The format of the Standard Task Graph set (Kasahara laboratory, Waseda University).

The first line says how many tasks there are, without an entry and an exit that take no time. Then each task has a line:
its number, its time, how many it waits for, and their numbers. What follows # is a comment. The shortest lengths are
published apart from the graphs; put them into a file `NAME.optimal` beside `NAME.stg`, a line each of a number of
processors and a length.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from dagexec.errors import ModelFormatError
from dagexec.lab.graph import MOST_EDGES, WorkGraph, check_size, work_graph
from dagexec.lab.text_file import read_text


def read_stg(path: Path) -> WorkGraph:
    """The graph of a file, its unit of time taken for seconds, with the shortest lengths from the file beside it.

    Raises ModelFormatError with file, line and task for what breaks the format, CycleError, and ResourceError.
    """
    optimal = path.with_suffix(".optimal")
    return parse_stg(read_text(path), str(path), _lengths(optimal) if optimal.exists() else {})


def parse_stg(text: str, where: str, optimum: dict[int, float] | None = None) -> WorkGraph:
    """As `read_stg`, from the text; `where` is the file's name."""
    lines = _lines(text)
    number, words = next(lines, (1, []))
    if len(words) != 1:
        raise ModelFormatError(f"{where}: line {number}: expected the number of tasks, found {' '.join(words)[:40]!r}")
    count = 2 + _natural(words[0], f"{where}: line {number}: the number of tasks")
    check_size(f"{where}: line {number}", count)
    rows: list[tuple[str, float, list[int]]] = []
    edges = 0
    for number, words in lines:
        if len(rows) == count:
            raise ModelFormatError(f"{where}: line {number}: expected {count} tasks, found another one")
        task = f"{where}: line {number}: task {words[0]!r:.40}"
        if words[0] != str(len(rows)):
            raise ModelFormatError(f"{task}: expected task {len(rows)}")
        if len(words) < 3:
            raise ModelFormatError(f"{task}: expected a time and how many tasks it waits for")
        seconds = _time(words[1], task)
        waits = _natural(words[2], f"{task}: how many it waits for")
        if waits != len(words) - 3:
            raise ModelFormatError(f"{task}: waits for {waits} tasks, but names {len(words) - 3}")
        parents = [_natural(word, f"{task}: a task that it waits for") for word in words[3:]]
        if unknown := [parent for parent in parents if parent >= count]:
            raise ModelFormatError(f"{task}: waits for {unknown[0]}, but the last task is {count - 1}")
        edges += waits
        if edges > MOST_EDGES:
            check_size(f"{where}: line {number}", count, edges)
        rows.append((words[0], seconds, parents))
    if len(rows) < count:
        raise ModelFormatError(f"{where}: line {number}: the file ends after {len(rows)} of {count} tasks")
    return work_graph(where, rows, optimum)


def _lengths(path: Path) -> dict[int, float]:
    found: dict[int, float] = {}
    for number, words in _lines(read_text(path)):
        where = f"{path}: line {number}"
        if len(words) != 2:
            raise ModelFormatError(f"{where}: expected a number of processors and a length")
        found[_natural(words[0], f"{where}: processors")] = _time(words[1], where)
    return found


def _lines(text: str) -> Iterator[tuple[int, list[str]]]:
    """The lines with anything but comments, counted from 1."""
    for number, line in enumerate(text.split("\n"), 1):
        words = line.partition("#")[0].split()
        if words:
            yield number, words


def _natural(word: str, what: str) -> int:
    if not (word.isascii() and word.isdecimal() and len(word) <= 12):
        raise ModelFormatError(f"{what}: expected a number of 0 or more, found {word!r:.40}")
    return int(word)


def _time(word: str, task: str) -> float:
    try:
        seconds = float(word)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < 1e300:
        raise ModelFormatError(f"{task}: expected a time of 0 or more, found {word!r:.40}")
    return seconds
