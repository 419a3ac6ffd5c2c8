"""Examples that keep state: onnxruntime, which is fed what it gave back, writes the same tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import anyio
import numpy as np
import numpy.typing as npt
import onnx
import pytest

import dagexec

Array = npt.NDArray[Any]

pytest.importorskip("onnxruntime")

COUNT = 20


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "examples")
    return import_module


class Peer:
    """A session of onnxruntime whose states are fed by hand, as a session of ours is used."""

    def __init__(
        self, model: onnx.ModelProto | None, state: Mapping[str, Array] | None = None, other: Any = None
    ) -> None:
        import onnxruntime

        self.session = other or onnxruntime.InferenceSession(model.SerializeToString() if model else "")
        self.outputs = [output.name for output in self.session.get_outputs()]
        self.state = dict(state or {})
        for one in self.session.get_inputs():
            if one.name.startswith("past") and one.name not in self.state:
                shape = [0 if isinstance(size, str) else size for size in one.shape]
                self.state[one.name] = np.zeros(shape, np.float32)

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        results = dict(zip(self.outputs, self.session.run(None, {**feeds, **self.state}), strict=True))
        for name in self.state:
            for becomes in (name.replace("past", "present"), f"new_{name}"):
                if becomes in results and becomes != name:
                    self.state[name] = results[becomes]
        return results

    def fork(self) -> Peer:
        return Peer(None, self.state, self.session)

    def close(self) -> None:
        self.state = {}


@pytest.mark.parametrize("generate", ["greedy", "top_k", "beam_search"])
def test_texts_are_the_peers(load: Callable[[str], ModuleType], generate: str) -> None:
    example = load("generate_text")
    model = example.gpt()
    with dagexec.compile(model) as executor:
        words = getattr(example, generate)(executor.session(), COUNT)
    assert words == getattr(example, generate)(Peer(model), COUNT)
    assert len(set(words)) > COUNT // 2


def test_words_of_sounds_are_the_peers(load: Callable[[str], ModuleType]) -> None:
    example = load("transcribe")
    encoder, decoder = example.whisper_encoder(bands=example.BANDS), example.whisper_decoder()
    texts = []
    for sound in example.sounds(3):
        with dagexec.compile(encoder) as first, dagexec.compile(decoder) as second, second.session() as session:
            session.reset(first.run({"sound": sound}))
            texts.append(example.transcribe(session, COUNT))
        assert texts[-1] == example.transcribe(Peer(decoder, Peer(encoder).run({"sound": sound})), COUNT)
    assert len({tuple(words) for words in texts}) == len(texts), "each sound has words of its own"


def test_what_is_detected_is_what_the_peer_detects(load: Callable[[str], ModuleType]) -> None:
    example = load("detect_speech")
    sound = example.sounds(20, 6)
    found = anyio.run(example.detect, sound)
    for stream in range(sound.shape[1]):
        peer = Peer(
            example.detector(), {"context": np.zeros((1, 64), np.float32), "state": np.zeros((2, 1, 128), np.float32)}
        )
        expected = [peer.run({"samples": frame[stream]})["probability"][0, 0] for frame in sound]
        np.testing.assert_allclose(found[:, stream], expected, rtol=1e-4)
    assert np.ptp(found) > 0.01


@pytest.mark.parametrize("name", ["gpt", "llama", "whisper_decoder", "t5_decoder"])
def test_decoders_run_by_steps(load: Callable[[str], ModuleType], name: str) -> None:
    model = getattr(load("random_models.decoders"), name)()
    random = np.random.default_rng(1)
    crosses = [one.name for one in model.graph.input if one.name.startswith("cross")]
    state = {one: random.standard_normal((1, 4, 30, 16), np.float32) for one in crosses}
    peer = Peer(model, state)
    with dagexec.compile(model) as executor, executor.session() as session:
        session.reset(state)
        for length in [20, *[1] * 200]:
            feeds = {"ids": random.integers(0, 1000, (1, length))}
            expected = peer.run(feeds)["scores"]
            np.testing.assert_allclose(session.run(feeds)["scores"], expected, rtol=1e-3, atol=1e-3)
        assert executor.net().preparation_statistics().made == bool(crosses), "texts alone run at full lengths"
