"""A character model: an LSTM that says how probable each character is as the next one of a text.

Graves, 2013, "Generating sequences with recurrent neural networks", arXiv:1308.0850, with one layer and an embedding.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dagexec.building.model_builder import ModelBuilder
from dagexec.core.dtypes import FLOAT32, INT32
from dagexec.core.workspace import Workspace
from dagexec.platform.records import dataclass

__all__ = ["CharLSTM"]

Codes = npt.NDArray[np.int32]


@dataclass(frozen=True)
class CharLSTM:
    """A model of texts.

    Attributes:
        characters: those it knows, each once.
        embedding: numbers that stand for a character.
        hidden: size of the LSTM's state.
    """

    characters: str
    embedding: int = 32
    hidden: int = 128

    @classmethod
    def of(cls, text: str) -> CharLSTM:
        """The model of the usual size for the characters of `text`."""
        return cls("".join(sorted(set(text))))

    def encode(self, text: str) -> Codes:
        """The number of each character. Raises ValueError for one that the model does not know."""
        numbers = {character: number for number, character in enumerate(self.characters)}
        unknown = sorted(set(text).difference(numbers))
        if unknown:
            raise ValueError(f"the model does not know {unknown}; it knows {self.characters!r}")
        return np.array([numbers[character] for character in text], np.int32)

    def windows(self, text: str, steps: int, stride: int) -> dict[str, Codes]:
        """Pieces of `steps` characters that begin every `stride` characters, and the character behind each.

        `characters` and `next` are both pieces x steps. Raises ValueError for a text without one whole piece.
        """
        codes = self.encode(text)
        starts = np.arange(0, len(codes) - steps, stride)[:, None]
        if not starts.size:
            raise ValueError(f"a piece of {steps} characters and its successor do not fit in {len(codes)} characters")
        places = starts + np.arange(steps)
        return {"characters": codes[places], "next": codes[places + 1]}

    def add_inputs(self, builder: ModelBuilder, batch_size: int, steps: int) -> None:
        """Declare `characters` and `next` (batch_size x steps)."""
        for name in ("characters", "next"):
            builder.add_input(name, (batch_size, steps), INT32)

    def add_layers(self, builder: ModelBuilder) -> tuple[str, str]:
        """From the inputs to the probabilities of the characters, a row each, and the loss in nats a character."""
        characters = builder.transpose("characters", "characters_by_step", [1, 0])
        scores, _ = self._scores(builder, characters)
        target = builder.reshape(builder.transpose("next", "next_by_step", [1, 0]), "target", [-1])
        return builder.softmax_with_loss(scores, target)

    def _scores(
        self, builder: ModelBuilder, characters: str, initial: tuple[str, str] | None = None
    ) -> tuple[str, tuple[str, str]]:
        """From characters, steps x batch, to a row of scores for each; and the last state."""
        x = builder.embedding(characters, "embedded", len(self.characters), self.embedding)
        x, hidden, cell = builder.lstm(x, "lstm", self.embedding, self.hidden, initial=initial)
        rows = builder.reshape(x, "rows", [-1, self.hidden])
        return builder.fc(rows, "scores", self.hidden, len(self.characters)), (hidden, cell)

    def generate(
        self, parameters: Workspace, start: str, count: int, *, temperature: float = 1.0, seed: int = 0
    ) -> str:
        """`count` characters drawn one after the other, behind `start`, with the trained parameters of a workspace.

        A `temperature` below 1 prefers probable characters. Raises ValueError when that is not above 0, and for an
        empty `start`.
        """
        if not start or not temperature > 0:
            raise ValueError(f"expected a nonempty start and a temperature above 0, found {start!r} and {temperature}")
        builder = ModelBuilder("char_lstm_generator")
        builder.add_input("characters", (None, 1), INT32)
        state = ("hidden_before", "cell_before")
        for name in state:
            builder.add_input(name, (1, 1, self.hidden), FLOAT32)
        scores, after = self._scores(builder, "characters", state)
        workspace = Workspace(parameters)
        for name in state:
            workspace.feed_blob(name, np.zeros((1, 1, self.hidden), np.float32))
        draws = np.random.default_rng(seed).uniform(size=count)
        codes = self.encode(start)
        found = []
        for draw in draws:
            workspace.feed_blob("characters", codes.reshape(-1, 1))
            if builder.net.name not in workspace.nets:
                workspace.create_net(builder.net, "simple")
            workspace.run_net(builder.net.name)
            last_scores = workspace.fetch_blob(scores)[-1].astype(np.float64)
            heights = np.cumsum(np.exp((last_scores - last_scores.max()) / temperature))
            chosen = np.searchsorted(heights, draw * heights[-1], side="right")
            codes = np.array([min(int(chosen), len(self.characters) - 1)], np.int32)
            found.append(self.characters[codes[0]])
            for before, last in zip(state, after, strict=True):
                workspace.feed_blob(before, workspace.fetch_blob(last).copy())
        if builder.net.name in workspace.nets:
            workspace.delete_net(builder.net.name)
        return "".join(found)
