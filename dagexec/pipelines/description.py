"""Pipelines as data: a mapping, as a TOML file or a part of one holds it.

    name = "ocr"

    [inputs]
    image = "float32[1, 3, 64, 256]"

    [stages.detect]
    model = "detection.onnx"           # what load_model takes; files are relative to the description
    inputs = { x = "image" }

    [stages.crop]
    python = "steps.py:crop"           # a file beside the description, or an installed module
    inputs = ["image", "detect/boxes"]
    outputs = { crops = "float32[N, 3, 16, 64]" }

    [stages.recognize]
    model = "recognition.onnx"
    inputs = { x = "crop" }            # a stage of one output stands for that

    [outputs]
    text = "recognize/logits"

Stages may stand in any order. A description may name Python functions, which are imported and called: read only those
of people whose programs you would run.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from graphlib import CycleError as GraphCycleError
from graphlib import TopologicalSorter
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType
from typing import Any, Protocol

from dagexec.errors import PipelineError
from dagexec.pipelines.stage import SEPARATOR, Stage, Value

_KEYS = {"name", "inputs", "stages", "outputs"}
_MODEL_KEYS = {"model", "inputs", "drop", "shapes", "foreign"}
_PYTHON_KEYS = {"python", "inputs", "outputs", "takes", "row_wise", "seconds"}
_ZOO_PREFIX = "zoo:"


class Building(Protocol):
    """A pipeline under construction."""

    name: str

    def input(self, *args: Any, **options: Any) -> Value: ...
    def stage(self, *args: Any, **options: Any) -> Stage: ...
    def python(self, *args: Any, **options: Any) -> Stage: ...
    def output(self, *args: Any, **options: Any) -> None: ...


def build(pipeline: Building, description: Mapping[str, Any], folder: Path) -> None:
    """Give a new `pipeline` what `description` says; files are relative to `folder`.

    Raises PipelineError for what is wrong in it, and what `Pipeline.stage` raises.
    """
    owner = f"pipeline {pipeline.name!r}"
    _check_keys(owner, description, _KEYS)
    inputs = _table(description, "inputs", owner)
    stages = _table(description, "stages", owner)
    outputs = _table(description, "outputs", owner)
    made: dict[str, Value | Stage] = {one: _input(pipeline, one, spec) for one, spec in inputs.items()}
    for stage in _in_order(owner, stages, made):
        _add(pipeline, stage, stages[stage], made, folder)
    for one, reference in outputs.items():
        pipeline.output(one, _referred(f"{owner}: output {one!r}", reference, made, stages))


def _input(pipeline: Building, name: str, spec: object) -> Value:
    if not isinstance(spec, str):
        raise PipelineError(f'pipeline {pipeline.name!r}: input {name!r}: expected a type such as "float32[1, 3]"')
    return pipeline.input(name, spec if "[" in spec else spec or None)


def _in_order(owner: str, stages: Mapping[str, Any], inputs: Mapping[str, object]) -> list[str]:
    """The stages, each after those that it reads. Raises PipelineError for a cycle, and for what is no stage."""
    before: dict[str, list[str]] = {}
    for name, table in stages.items():
        where = f"{owner}: stage {name!r}"
        if not isinstance(table, Mapping):
            raise PipelineError(f"{where}: expected a table, found {table!r:.80}")
        listed = table.get("inputs", {})
        values = listed.values() if isinstance(listed, Mapping) else [listed] if isinstance(listed, str) else listed
        if not isinstance(values, Sequence | type({}.values())):
            raise PipelineError(f"{where}: inputs must be a table or a list of what it reads, found {listed!r:.80}")
        read = [_stage_of(where, reference, inputs, stages) for reference in values]
        before[name] = [one for one in read if one]
    try:
        return list(TopologicalSorter(before).static_order())
    except GraphCycleError as error:
        cycle = " -> ".join(error.args[1])
        raise PipelineError(f"{owner}: its stages read each other in a cycle: {cycle}") from None


def _stage_of(where: str, reference: object, inputs: Mapping[str, object], stages: Mapping[str, Any]) -> str:
    """The stage of a reference; "" for an input of the pipeline."""
    if not isinstance(reference, str):
        raise PipelineError(f'{where}: expected "input", "stage" or "stage/output", found {reference!r:.80}')
    stage = reference.partition(SEPARATOR)[0]
    if reference in inputs:
        return ""
    if stage not in stages:
        raise PipelineError(
            f"{where}: {reference!r} is none of the inputs {sorted(inputs)} and of no stage of {sorted(stages)}"
        )
    return stage


def _referred(
    where: str, reference: object, made: Mapping[str, Value | Stage], stages: Mapping[str, Any]
) -> Value | Stage:
    """What a reference means."""
    found = {name: one for name, one in made.items() if isinstance(one, Value)}
    stage = _stage_of(where, reference, found, stages)
    assert isinstance(reference, str)
    if not stage:
        return made[reference]
    source = made[stage]
    assert isinstance(source, Stage)
    output = reference.partition(SEPARATOR)[2]
    if output and output not in source.outputs:
        raise PipelineError(f"{where}: stage {stage!r} has no output {output!r}; it has {list(source.outputs)}")
    return source[output] if output else source.value()


def _add(pipeline: Building, name: str, table: Mapping[str, Any], made: dict[str, Value | Stage], folder: Path) -> None:
    where = f"pipeline {pipeline.name!r}: stage {name!r}"
    if ("model" in table) == ("python" in table):
        raise PipelineError(f"{where}: needs one of the keys model and python, found {sorted(table)}")
    stages = {one: None for one, value in made.items() if isinstance(value, Stage)}
    listed = table.get("inputs", {})

    def referred(reference: object) -> Value | Stage:
        return _referred(where, reference, made, stages)

    if "model" in table:
        _check_keys(where, table, _MODEL_KEYS)
        given = referred(listed) if isinstance(listed, str) else {one: referred(ref) for one, ref in listed.items()}
        options = {key: table[key] for key in ("drop", "shapes", "foreign") if key in table}
        made[name] = pipeline.stage(name, _source(where, table["model"], folder), given, **options)
        return
    _check_keys(where, table, _PYTHON_KEYS)
    if "outputs" not in table:
        raise PipelineError(f'{where}: needs outputs, such as outputs = "float32[N, 3]"')
    function = _function(where, table["python"], folder)
    values = [referred(reference) for reference in ([listed] if isinstance(listed, str) else listed)]
    options = {key: table[key] for key in ("takes", "row_wise", "seconds") if key in table}
    made[name] = pipeline.python(name, function, values, table["outputs"], **options)


def _source(where: str, source: object, folder: Path) -> str:
    if not isinstance(source, str):
        raise PipelineError(f'{where}: model must be a file or "zoo:NAME", found {source!r:.80}')
    return source if source.startswith(_ZOO_PREFIX) else str(folder / source)


def _function(where: str, named: object, folder: Path) -> Callable[..., Any]:
    """The function of "module:function" or "file.py:function"."""
    module_name, colon, name = named.rpartition(":") if isinstance(named, str) else ("", "", "")
    if not (colon and module_name and name.isidentifier()):
        raise PipelineError(f'{where}: python must be "module:function" or "file.py:function", found {named!r:.80}')
    try:
        module = _file(folder / module_name) if module_name.endswith(".py") else importlib.import_module(module_name)
    except Exception as error:  # whatever the module raises
        raise PipelineError(f"{where}: {module_name} cannot be imported: {type(error).__name__}: {error}") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise PipelineError(f"{where}: {module_name} has no function {name!r}")
    found: Callable[..., Any] = function
    return found


class _SourceAsItIs(SourceFileLoader):
    """Compiles the file each time. Bytecode that Python has cached counts as current while the file's size and second
    of change are the same, so a step that was edited and loaded again within a second would be the old one.
    """

    def get_code(self, fullname: str) -> CodeType:
        code: CodeType = self.source_to_code(self.get_data(self.path), self.path)
        return code


def _file(path: Path) -> object:
    spec = importlib.util.spec_from_file_location(path.stem, path, loader=_SourceAsItIs(path.stem, str(path)))
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _table(description: Mapping[str, Any], key: str, owner: str) -> Mapping[str, Any]:
    found = description.get(key)
    if not isinstance(found, Mapping) or not found:
        raise PipelineError(f"{owner}: needs a table {key!r}, found {found!r:.80}")
    return found


def _check_keys(where: str, table: Mapping[str, Any], known: set[str]) -> None:
    unknown = sorted(set(table) - known)
    if unknown:
        raise PipelineError(f"{where}: unknown keys {unknown}; known are {sorted(known)}")
