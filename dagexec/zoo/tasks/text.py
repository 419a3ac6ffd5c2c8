"""The text of this project's README: nine tenths to train on, the last one held out."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

from dagexec.errors import DataError
from dagexec.training.model_helper import ModelHelper
from dagexec.training.optimizer import Adam
from dagexec.training.task import Results, TrainingTask
from dagexec.zoo.char_lstm import CharLSTM

STEPS = 64
"""Characters of a sample."""


def char_lstm(_seed: int) -> TrainingTask:
    """The character model on overlapping pieces of the text. Its loss is in nats a character."""
    text = readme()
    cut = len(text) * 9 // 10
    model = CharLSTM.of(text)

    def add_inputs(helper: ModelHelper, batch_size: int) -> None:
        model.add_inputs(helper, batch_size, STEPS)

    def add_layers(helper: ModelHelper) -> Results:
        _, loss = model.add_layers(helper)
        return Results([loss], {"loss": loss})

    return TrainingTask(
        "char_lstm",
        add_inputs,
        add_layers,
        Adam(0.01, max_gradient_norm=5.0),
        model.windows(text[:cut], STEPS, STEPS // 8),
        model.windows(text[cut:], STEPS, STEPS),
        batch_size=32,
        epochs=12,
        unit="pieces",
    )


def readme() -> str:
    """The README beside the package, or the one that was installed with it. Raises DataError when there is none."""
    beside = Path(__file__).parents[3] / "README.md"
    if beside.is_file():
        return beside.read_text(encoding="utf-8")
    try:
        text = metadata.metadata("dagexec").json.get("description")
    except metadata.PackageNotFoundError:
        text = None
    if not isinstance(text, str) or not text:
        raise DataError("the README of dagexec is neither beside the package nor installed with it")
    return text
