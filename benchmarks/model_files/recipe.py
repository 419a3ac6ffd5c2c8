"""One file to make, and the folder that keeps what was made: each model beside the arrays that it is tried with."""

from __future__ import annotations

import itertools
import logging
import multiprocessing
import os
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Feeds = Mapping[str, Array]


@dataclass(frozen=True)
class Recipe:
    """How one file is made.

    Attributes:
        name: of the file, without its suffix and with the family's folder.
        write: writes the model to the path that it is given and returns the feeds of the runs to try. It runs in a
            process of its own.
    """

    name: str
    write: Callable[[Path], Sequence[Feeds]]

    def make(self, folder: Path) -> None:
        """Write the model and its feeds into `folder`; the feeds last, so that a file with feeds is complete."""
        model = model_file(folder, self.name)
        model.parent.mkdir(parents=True, exist_ok=True)
        try:
            runs = self.write(model)
        except BaseException:
            model.unlink(missing_ok=True)
            raise
        for number, feeds in enumerate(runs):
            arrays: dict[str, Any] = {key: _storable(value) for key, value in feeds.items()}
            np.savez(feeds_file(folder, self.name, number), **arrays)


def make_files(recipes: Iterable[Recipe], folder: Path, patterns: Sequence[str]) -> None:
    """Write the files that are not there yet, each in a process of its own; what cannot be exported is said."""
    for recipe in recipes:
        if recipe.name in stored_names(folder) or not matches(recipe.name, patterns):
            continue
        process = multiprocessing.get_context("fork").Process(target=_make_quietly, args=(recipe, folder))
        process.start()
        process.join()
        print(f"{recipe.name}: {'made' if process.exitcode == 0 else 'was not exported'}", flush=True)


def _make_quietly(recipe: Recipe, folder: Path) -> None:
    """What exporters print goes into a file."""
    (folder / recipe.name).parent.mkdir(exist_ok=True)
    log = os.open(folder / f"{recipe.name}.log", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    try:
        recipe.make(folder)
    except Exception:
        traceback.print_exc()
        raise SystemExit(1) from None


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Whether one of the patterns is a part of the name, or there are none."""
    return not patterns or any(pattern in name for pattern in patterns)


def model_file(folder: Path, name: str) -> Path:
    """Where a model is kept."""
    return folder / f"{name}.onnx"


def stored_names(folder: Path) -> list[str]:
    """The models that were made, sorted."""
    return sorted(path.relative_to(folder).as_posix().removesuffix(".0.npz") for path in folder.glob("*/*.0.npz"))


def stored_feeds(folder: Path, name: str) -> Iterator[dict[str, Array]]:
    """The feeds of each run, in order."""
    for number in itertools.count():
        file = feeds_file(folder, name, number)
        if not os.path.exists(file):
            return
        with np.load(file, allow_pickle=False) as arrays:
            yield {key: _stored(arrays[key]) for key in arrays.files}


def feeds_file(folder: Path, name: str, number: int) -> Path:
    """Where the feeds of a run are kept."""
    return folder / f"{name}.{number}.npz"


def _storable(array: Array) -> Array:
    """Objects are texts here, and stored as NumPy's own texts, which need no pickle."""
    return array.astype(str) if array.dtype == object else array


def _stored(array: Array) -> Array:
    return array.astype(object) if array.dtype.kind == "U" else array
