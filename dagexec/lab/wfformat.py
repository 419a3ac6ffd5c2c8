"""WfFormat 1.5 and 1.6, the JSON of WfCommons: scientific workflows as they ran, with the time of each task.

Of a file only tasks are read: `workflow.specification.tasks` with `id`, `parents` and `children`, and
`workflow.execution.tasks` with `id` and `runtimeInSeconds`. Of a graph that is written, the makespan is its work: that
of one worker. What is read or written between them is left aside, as all
workers here share one memory.
"""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from dagexec.errors import ModelFormatError
from dagexec.lab.graph import WorkGraph, check_size, is_work, work_graph
from dagexec.lab.text_file import read_text
from dagexec.platform.files import write_atomically

VERSIONS = ("1.5", "1.6")


def read_wfformat(path: Path) -> WorkGraph:
    """The graph of a file. Raises ModelFormatError with file, line and task, CycleError, and ResourceError."""
    return parse_wfformat(read_text(path), str(path))


def parse_wfformat(text: str, where: str) -> WorkGraph:
    """As `read_wfformat`, from the text; `where` is the file's name."""
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        raise ModelFormatError(f"{where}: line {error.lineno}: {error.msg}") from None
    except (ValueError, RecursionError) as error:
        raise ModelFormatError(f"{where}: no JSON that can be read: {error}") from None
    reader = _Reader(text, where)
    version = content.get("schemaVersion") if isinstance(content, dict) else None
    if version not in VERSIONS:
        raise ModelFormatError(f"{where}: schemaVersion: expected {' or '.join(VERSIONS)}, found {version!r:.40}")
    workflow = reader.member(content, "workflow", dict, "the file")
    named = reader.tasks(workflow, "specification")
    seconds = reader.seconds(reader.tasks(workflow, "execution"))
    numbers = {name: number for number, name in enumerate(named)}
    parents: list[list[int]] = [[] for _ in named]
    edges = 0
    for name, task in named.items():
        for key, is_child in (("parents", False), ("children", True)):
            for other in reader.names(task, key, name):
                if other not in numbers:
                    raise reader.error(name, f"{key} names {other!r:.80}, which is no task")
                first, then = (name, other) if is_child else (other, name)
                parents[numbers[then]].append(numbers[first])
                edges += 1
        check_size(where, len(named), edges // 2)
        if name not in seconds:
            raise reader.error(name, "has no runtimeInSeconds in workflow.execution.tasks")
    return work_graph(where, [(name, seconds[name], parents[number]) for name, number in numbers.items()])


def write_wfformat(graph: WorkGraph, path: Path) -> None:
    """Put the graph, whose tasks have a name each, at `path`, for whoever reads WfFormat. Raises OutputError."""
    names = [task.name for task in graph.tasks]
    children: list[list[str]] = [[] for _ in names]
    for task in graph.tasks:
        for parent in task.parents:
            children[parent].append(task.name)
    specified = [
        {"id": one.name, "name": one.name, "parents": [names[parent] for parent in one.parents], "children": row}
        for one, row in zip(graph.tasks, children, strict=True)
    ]
    ran = [{"id": task.name, "runtimeInSeconds": task.seconds} for task in graph.tasks]
    now = datetime.now(UTC).isoformat(timespec="seconds")
    execution = {"makespanInSeconds": graph.work, "executedAt": now, "tasks": ran}
    workflow = {"specification": {"tasks": specified}, "execution": execution}
    content = {"name": graph.name, "schemaVersion": VERSIONS[0], "workflow": workflow}
    write_atomically(path, json.dumps(content, indent=1).encode())


class _Reader:
    """Gives members of a file's JSON, or raises what is wrong with them."""

    def __init__(self, text: str, where: str) -> None:
        self._text = text
        self._where = where

    def error(self, task: str, problem: str, part: str = "specification") -> ModelFormatError:
        """The error for a task, at the line of that part that has its id as it is usually written."""
        begin = max(0, self._text.find(f'"{part}"'))
        spelled = "|".join(re.escape(json.dumps(task, ensure_ascii=ascii)) for ascii in (True, False))
        found = re.compile(rf'"id"\s*:\s*(?:{spelled})').search(self._text, begin)
        line = "" if found is None else f"line {self._text.count(chr(10), 0, found.start()) + 1}: "
        return ModelFormatError(f"{self._where}: {line}task {task!r:.80}: {problem}")

    def member(self, owner: dict[str, Any], key: str, kind: type, of: str) -> Any:
        """A member that has to be there, of that kind."""
        found = owner.get(key)
        if not isinstance(found, kind):
            expected = "an object" if kind is dict else "an array" if kind is list else "a text"
            raise ModelFormatError(f"{self._where}: {of}: {key!r}: expected {expected}, found {found!r:.40}")
        return found

    def tasks(self, workflow: dict[str, Any], part: str) -> dict[str, dict[str, Any]]:
        """The tasks of a part of the workflow, by id."""
        path = f"workflow.{part}.tasks"
        rows = self.member(self.member(workflow, part, dict, "workflow"), "tasks", list, f"workflow.{part}")
        check_size(f"{self._where}: {path}", len(rows))
        found: dict[str, dict[str, Any]] = {}
        for number, row in enumerate(rows):
            if not isinstance(row, dict):
                raise ModelFormatError(f"{self._where}: {path}[{number}]: expected an object, found {row!r:.40}")
            name = self.member(row, "id", str, f"{path}[{number}]")
            if name in found:
                raise self.error(name, f"{path} has two tasks of this id", part)
            found[name] = row
        return found

    def names(self, task: dict[str, Any], key: str, name: str) -> list[str]:
        """The ids under `key`; none where it is absent."""
        found = task.get(key, [])
        if not isinstance(found, list) or not all(isinstance(one, str) for one in found):
            raise self.error(name, f"{key}: expected an array of ids, found {found!r:.40}")
        return found

    def seconds(self, tasks: dict[str, dict[str, Any]]) -> dict[str, float]:
        """What tasks took, by id."""
        for name, task in tasks.items():
            if not is_work(task.get("runtimeInSeconds")):
                found = task.get("runtimeInSeconds")
                raise self.error(name, f"runtimeInSeconds: expected 0 or more, found {found!r:.40}", "execution")
        return {name: float(task["runtimeInSeconds"]) for name, task in tasks.items()}
