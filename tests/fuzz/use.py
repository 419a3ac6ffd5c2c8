"""What is done with the files of a case: what users do with such files, through the public entrances.

Each use returns a word for what it came to; what it raises is the case's outcome. Models run where nothing beside an
array may be touched (`tests.guarded`).
"""

from __future__ import annotations

import contextlib
import io
import random
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import numpy.typing as npt

import dagexec
from dagexec.analysis.comparison import random_feeds
from dagexec.building.model_builder import ModelBuilder
from dagexec.cli.check import check_command
from dagexec.cli.feeds import read_feeds
from dagexec.cli.inspect import inspect_command
from dagexec.core.choices import choices, load_choices
from dagexec.core.model import Model
from dagexec.core.workspace import Workspace
from dagexec.executor.source.loading import load_model
from dagexec.storage import open_database
from dagexec.storage.blob_file import read_blob_file
from dagexec.training.checkpoint import latest_checkpoint, load_checkpoint
from dagexec.training.safetensors_file import import_safetensors, read_safetensors
from tests.fuzz.drawn import draw
from tests.fuzz.near import WrongError, require_near, same
from tests.guarded import Guards, guarded_memory

Array = npt.NDArray[Any]
Phase = Callable[[str], None]

_MAX_FED = 1 << 20
"""Elements of all inputs together beyond which a model is compiled, and not run: it would be the fuzzer's memory."""


def use(kind: str, path: Path, feeds: Mapping[str, Array], rng: random.Random, phase: Phase) -> str:
    """Do with the file or folder at `path` what users do with one of its kind; `phase` is told what comes next."""
    return _USES[kind](path, feeds, rng, phase)


def _use_model(path: Path, feeds: Mapping[str, Array], rng: random.Random, phase: Phase) -> str:
    phase("load")
    model = load_model(path)
    way = rng.choices(tuple(_WAYS), [weight for weight, _ in _WAYS.values()])[0]
    phase(way)
    given, guards = _feeds(model, feeds), Guards.drawn(rng)
    with guarded_memory(guards):
        return f"{way}: {_WAYS[way][1](path, model, None if given is None else guards.copies(given), phase)}"


def _feeds(model: Model, feeds: Mapping[str, Array]) -> dict[str, Array] | None:
    """Arrays for the inputs; None when they would be too large."""
    shapes = _shapes(model, feeds)
    sizes = [info.shape or () for info in model.inputs.values()]
    if sum(int(np.prod([size or 1 for size in row], dtype=np.float64)) for row in sizes) > _MAX_FED:
        return None
    given = random_feeds(model, shapes)
    return given | {name: array for name, array in feeds.items() if model.inputs.get(name, None) and name in given}


def _shapes(model: Model, feeds: Mapping[str, Array]) -> dict[str, tuple[int, ...]]:
    unknown = [name for name, info in model.inputs.items() if info.shape is None]
    return {name: feeds[name].shape if name in feeds else (2, 3) for name in unknown}


def _default(_path: Path, model: Model, feeds: dict[str, Array] | None, phase: Phase) -> str:
    with dagexec.compile(model, shapes=_shapes_to_tune_for(model, feeds)) as executor:
        if feeds is None:
            return "not run"
        phase("run")
        executor.run(feeds)
        executor.run(feeds)
    return "ran"


def _shapes_to_tune_for(model: Model, feeds: dict[str, Array] | None) -> dict[str, tuple[int, ...]] | None:
    """Shapes of the inputs; None where one is of a type that the model does not tell."""
    given = {name: array for name, array in (feeds or {}).items() if model.inputs[name].dtype is None}
    return None if any(array.dtype != np.float32 for array in given.values()) else _of(feeds)


def _of(feeds: dict[str, Array] | None) -> dict[str, tuple[int, ...]] | None:
    return {name: array.shape for name, array in feeds.items()} if feeds else None


def _narrow(dtype: str) -> Callable[[Path, Model, dict[str, Array] | None, Phase], str]:
    def way(_path: Path, model: Model, feeds: dict[str, Array] | None, phase: Phase) -> str:
        if feeds is None:
            return "not run"
        with dagexec.compile(model, dtype=dtype, calibration=feeds) as executor:  # type: ignore[arg-type]
            phase("run")
            executor.run(feeds)
        return "ran"

    return way


def _compared(_path: Path, model: Model, feeds: dict[str, Array] | None, phase: Phase) -> str:
    """In list order, with two workers and optimized: the same bytes, and nearly the same numbers."""
    found = []
    for options in ({"net_type": "simple"}, {"net_type": "simple"}, {"net_type": "dag", "num_workers": 2}):
        with dagexec.compile(model, optimize=False, **options) as executor:  # type: ignore[arg-type]
            if feeds is None:
                return "not run"
            phase("run as given")
            found.append(executor.run(feeds))
    simple, again, dag = found
    if not all(same(array, again[name]) for name, array in simple.items()):
        return "draws numbers"
    for name, array in simple.items():
        if not same(array, dag[name]):
            raise WrongError(f"{name!r}: other bytes under dag than under simple")
    phase("compile")
    with dagexec.compile(model) as executor:
        phase("run")
        fast = executor.run(feeds)
    for name, array in simple.items():
        require_near(name, array, fast[name])
    return "compared"


def _inspected(path: Path, model: Model, feeds: dict[str, Array] | None, phase: Phase) -> str:
    del phase
    with contextlib.redirect_stdout(io.StringIO()):
        inspect_command(
            str(path), shape=_shape_options(model, feeds), memory=feeds is not None, passes=True, compiled=True,
            device="cpu", as_json=True,
        )  # fmt: skip
    return "done"


def _checked(path: Path, model: Model, feeds: dict[str, Array] | None, phase: Phase) -> str:
    del phase
    if feeds is None:
        return "not done"
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        check_command(
            str(path), net_type="async_dag", device="sim:0", num_workers=2, streams=2, optimize=False,
            shape=_shape_options(model, feeds), as_json=True,
        )  # fmt: skip
    return "done"


def _shape_options(model: Model, feeds: dict[str, Array] | None) -> list[str]:
    unknown = [name for name, info in model.inputs.items() if info.shape is None]
    given = {name: array for name, array in (feeds or {}).items() if name in unknown}
    return [f"{name}={array.dtype}:{','.join(map(str, array.shape))}" for name, array in given.items()]


Way = Callable[[Path, Model, dict[str, Array] | None, Phase], str]
_WAYS: dict[str, tuple[int, Way]] = {
    "default": (45, _default),
    "compare": (30, _compared),
    "inspect": (10, _inspected),
    "check": (5, _checked),
    "bfloat16": (5, _narrow("bfloat16")),
    "int8": (5, _narrow("int8")),
}


def _use_checkpoint(path: Path, feeds: Mapping[str, Array], rng: random.Random, phase: Phase) -> str:
    del feeds, rng
    phase("latest")
    latest_checkpoint(path.parent)
    phase("load")
    load_checkpoint(Workspace(), path)
    return "loaded"


def _use_database(path: Path, feeds: Mapping[str, Array], rng: random.Random, phase: Phase) -> str:
    del feeds
    db_type = path.suffix.removeprefix(".")
    if rng.random() < 0.4:
        phase("records")
        with open_database(db_type, path) as database, database.cursor() as cursor:
            for _ in cursor:
                pass
        return "records read"
    phase("blobs")
    read_blob_file(db_type, path)
    return "blobs read"


def _use_npz(path: Path, feeds: Mapping[str, Array], rng: random.Random, phase: Phase) -> str:
    del feeds, rng
    phase("read")
    model = choices_model()
    arrays = read_feeds(model, path, None, 0)
    phase("run")
    with dagexec.compile(model, net_type="simple", optimize=False) as executor:
        executor.run(arrays)
    return "ran"


def _use_safetensors(path: Path, feeds: Mapping[str, Array], rng: random.Random, phase: Phase) -> str:
    del feeds, rng
    phase("read")
    read_safetensors(path)
    workspace = Workspace()
    workspace.feed_blob("x", np.ones((2, 4), np.float32))
    import_safetensors(workspace, ["x"], path, strict=False)
    return "read"


def _use_choices(path: Path, feeds: Mapping[str, Array], rng: random.Random, phase: Phase) -> str:
    del feeds, rng
    phase("load")
    try:
        load_choices(path)
        model = choices_model()
        phase("compile")
        with dagexec.compile(model) as executor:
            phase("run")
            executor.run(random_feeds(model))
    finally:
        choices.forget()
    return "ran"


def _use_plan(path: Path, feeds: Mapping[str, Array], rng: random.Random, phase: Phase) -> str:
    if rng.random() < 0.2:
        return _use_model(path, feeds, rng, phase)
    phase("open")
    guards = Guards.drawn(rng)
    with guarded_memory(guards), dagexec.open(path, mapped=rng.random() < 0.7, replicas=1, num_workers=2) as executor:
        given = _feeds(executor.model, feeds)
        if given is None:
            return "not run"
        phase("run")
        executor.run(guards.copies(given))
    return "ran"


def _use_nothing(_path: Path, feeds: Mapping[str, Array], rng: random.Random, phase: Phase) -> str:
    del feeds
    phase("draw")
    drawn = draw(rng)
    phase(f"run {drawn.name}")
    drawn.run(Guards.drawn(rng))
    return "ran"


_USES: dict[str, Callable[[Path, Mapping[str, Array], random.Random, Phase], str]] = {
    "onnx": _use_model,
    "caffe2": _use_model,
    "predictor": _use_model,
    "checkpoint": _use_checkpoint,
    "minidb": _use_database,
    "lmdb": _use_database,
    "npz": _use_npz,
    "safetensors": _use_safetensors,
    "choices": _use_choices,
    "plan": _use_plan,
    "drawn": _use_nothing,
}


def choices_model() -> Model:
    """A model with something to choose: two branches of convolutions."""
    builder = ModelBuilder("small", seed=3)
    x = builder.add_input("x", (1, 8, 8, 8))
    left = builder.relu(builder.conv(x, "left", 8, 8, kernel=3, pad=1), "left_relu")
    right = builder.conv(x, "right", 8, 8, kernel=1)
    return builder.model([builder.softmax(builder.flatten(builder.concat([left, right], "joined"), "flat"), "softmax")])


def plausible_choices() -> Iterable[tuple[str, str]]:
    """The keys that are asked for when that model is compiled, each with something that may have been chosen."""
    asked: dict[str, None] = {}

    def find(key: str, *, given_only: bool = False) -> str | None:
        del given_only
        asked[key] = None
        return None

    with patch.object(choices, "find", find), dagexec.compile(choices_model()):
        pass
    names = ("direct brgconv:avx2", "winograd jit_wino_4x3:avx512_core", "own layout, direct x64:gemm:jit")
    for number, key in enumerate(asked):
        if key.startswith("run"):
            yield key, "0.002"
        else:
            yield key, "NHWC" if key.startswith("layout") else names[number % len(names)]
