"""Recurrent, audio and recommendation networks: sequences, spectra and waves, once at a time or as they arrive."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from model_files import carried
from model_files.torch_export import integers, normal
from torch import nn
from torch.nn import functional

from families.encoder import transformer
from families.net import NEWER, OLDER, Net, Packaged

_LETTERS, _WORDS = 128, 20000


class _Recurrent(nn.Module):  # type: ignore[misc, unused-ignore]
    """Frames of 80 numbers through two layers to 64 classes."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.layer, self.head = kind(80, 256, num_layers=2, batch_first=True), nn.Linear(256, 64)

    def forward(self, frames: Any) -> Any:
        return self.head(self.layer(frames)[0])


class _Tagger(nn.Module):  # type: ignore[misc, unused-ignore]
    """A class for every word or letter of a sentence, by an LSTM."""

    def __init__(self, vocabulary: int, width: int, layers: int, *, both_ways: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, 128)
        self.layer = nn.LSTM(128, width, num_layers=layers, bidirectional=both_ways, batch_first=True)
        self.head = nn.Linear(width * (2 if both_ways else 1), 48)

    def forward(self, words: Any) -> Any:
        return self.head(self.layer(self.embedding(words))[0])


class _Streaming(nn.Module):  # type: ignore[misc, unused-ignore]
    """Noise suppression of one frame of a spectrum; the state comes from the frame before."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.layer = nn.Linear(257, 256), nn.LSTM(256, 256, num_layers=2)
        self.mask = nn.Linear(256, 257)

    def forward(self, frame: Any, hidden: Any, cell: Any) -> Any:
        found, (hidden, cell) = self.layer(functional.relu(self.first(frame)).unsqueeze(0), (hidden, cell))
        return frame * torch.sigmoid(self.mask(found.squeeze(0))), hidden, cell


class _Crnn(nn.Module):  # type: ignore[misc, unused-ignore]
    """Reads a line of text of 32 x 160 pixels: convolutions down to a height of 1, then two LSTMs both ways."""

    def __init__(self) -> None:
        super().__init__()
        widths, parts = (1, 64, 128, 256, 256, 512, 512), list[Any]()
        for number, (before, after) in enumerate(pairwise(widths)):
            parts += [nn.Conv2d(before, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
            if number in (0, 1, 3, 5):
                parts.append(nn.MaxPool2d(2) if number < 2 else nn.MaxPool2d((2, 1)))
        self.features = nn.Sequential(*parts, nn.Conv2d(512, 512, 2), nn.ReLU())
        self.layers = nn.LSTM(512, 256, num_layers=2, bidirectional=True)
        self.head = nn.Linear(512, 97)

    def forward(self, line: Any) -> Any:
        columns = self.features(line).squeeze(2).permute(2, 0, 1)
        return functional.log_softmax(self.head(self.layers(columns)[0]), -1)


class _Dilated(nn.Module):  # type: ignore[misc, unused-ignore]
    """A block of Conv-TasNet (Luo and Mesgarani 2019): to more channels, a depthwise layer, and back, added."""

    def __init__(self, dilation: int) -> None:
        super().__init__()
        self.way = nn.Sequential(
            nn.Conv1d(128, 256, 1),
            nn.PReLU(),
            nn.GroupNorm(1, 256),
            nn.Conv1d(256, 256, 3, padding=dilation, dilation=dilation, groups=256),
            nn.PReLU(),
            nn.GroupNorm(1, 256),
            nn.Conv1d(256, 128, 1),
        )

    def forward(self, x: Any) -> Any:
        return x + self.way(x)


def _temporal() -> Any:
    """A second of frames of a learned filter bank, through two rounds of eight dilations."""
    return nn.Sequential(
        nn.Conv1d(64, 128, 1), *(_Dilated(2**n) for n in (*range(8), *range(8))), nn.Conv1d(128, 64, 1)
    )


class _Dlrm(nn.Module):  # type: ignore[misc, unused-ignore]
    """Naumov et al. 2019: 26 tables, products of all pairs, and two perceptrons."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(_WORDS, 64) for _ in range(26))
        self.numbers = nn.Sequential(*_perceptron(13, 512, 256, 64))
        self.click = nn.Sequential(*_perceptron(64 + 27 * 26 // 2, 512, 256), nn.Linear(256, 1))
        self.register_buffer("pairs", torch.tril_indices(27, 27, offset=-1))

    def forward(self, numbers: Any, categories: Any) -> Any:
        dense = self.numbers(numbers)
        rows = torch.stack([dense, *(table(categories[:, n]) for n, table in enumerate(self.tables))], 1)
        products = rows @ rows.transpose(1, 2)
        return torch.sigmoid(self.click(torch.cat([dense, products[:, self.pairs[0], self.pairs[1]]], 1)))


def _perceptron(*widths: int) -> list[Any]:
    pairs = pairwise(widths)
    return [part for before, after in pairs for part in (nn.Linear(before, after), nn.ReLU())]


def _keywords() -> Any:
    """DS-CNN (Zhang et al. 2017), for a second of 10 cepstral coefficients in 49 frames."""

    def block(kernel: Any, before: int, groups: int, **options: Any) -> list[Any]:
        return [nn.Conv2d(before, 64, kernel, groups=groups, bias=False, **options), nn.BatchNorm2d(64), nn.ReLU()]

    separable = [part for _ in range(4) for part in (*block(3, 64, 64, padding=1), *block(1, 64, 1))]
    ends = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 12))
    return nn.Sequential(*block((10, 4), 1, 1, stride=2, padding=(5, 1)), *separable, *ends)


def _numbers(name: str, *shape: int) -> Any:
    return lambda rows: {name: normal(rows, *shape, seed=rows)}


def _texts(vocabulary: int, length: int, rows: int) -> dict[str, Any]:
    return {"tokens": integers(vocabulary, rows, length, seed=rows)}


def _frame(rows: int) -> dict[str, Any]:
    return {
        "frame": normal(rows, 257).abs(),
        "hidden": normal(2, rows, 256, seed=1) / 2,
        "cell": normal(2, rows, 256, seed=2),
    }


def _clicks(rows: int) -> dict[str, Any]:
    return {"numbers": normal(rows, 13).abs(), "categories": integers(_WORDS, rows, 26, seed=rows)}


def _speech(rows: int) -> dict[str, Any]:
    """Half a thousandth part of a minute for silero's detector, with its state."""
    state, rate = carried.normal(2, rows, 128), np.array(16000)
    return {"input": carried.normal(rows, 576, scale=0.1), "state": state, "sr": rate}


_WAV2VEC2: dict[str, Any] = {"num_hidden_layers": 6, "feat_extract_norm": "group"}


def nets() -> list[Net | Packaged]:
    return [
        Net("tcn", _temporal, _numbers("frames", 64, 1000)),
        Net("gru", partial(_Recurrent, nn.GRU), _numbers("frames", 100, 80), exporter=OLDER),
        Net(
            "lstm_tagger",
            partial(_Tagger, _WORDS, 256, 1, both_ways=False),
            partial(_texts, _WORDS, 40),
            dynamic={"tokens": (0, 1)},
            exporter=OLDER,
        ),
        Net("crnn", _Crnn, _numbers("line", 1, 32, 160), exporter=OLDER, settle=4),
        Net("dlrm", _Dlrm, _clicks),
        Net(
            "bilstm",
            partial(_Tagger, _LETTERS, 256, 2, both_ways=True),
            partial(_texts, _LETTERS, 60),
            dynamic={"tokens": (0, 1)},
            exporter=OLDER,
        ),
        Net(
            "streaming_lstm",
            _Streaming,
            _frame,
            dynamic={"frame": (0,), "hidden": (1,), "cell": (1,)},
            exporter=OLDER,
        ),
        Net("keywords", _keywords, _numbers("coefficients", 1, 49, 10), settle=8),
        Net(
            "wav2vec2",
            transformer("Wav2Vec2ForCTC", "Wav2Vec2Config", **_WAV2VEC2),
            _numbers("wave", 16000),
            call=lambda module, wave: module(input_values=wave).logits,
            exporter=NEWER,
        ),
        Packaged("silero_vad", "silero-vad.silero_vad_16k_op15", _speech),
    ]
