"""The character model: its windows, its training on the project's README, and the text it writes."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from dagexec import Workspace
from dagexec.training.data import BatchLoader
from dagexec.training.model_helper import ModelHelper
from dagexec.training.optimizer import Adam
from dagexec.zoo.char_lstm import CharLSTM

README = Path(__file__).parent.parent.parent / "README.md"


def prose() -> str:
    """The README's sentences: no tables, and no code, whose characters are no language to learn."""
    text = re.sub(r"^```.*?^```$", "", README.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    return "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("|"))


def trained(model: CharLSTM, text: str, steps: int, net_type: str = "simple") -> tuple[Workspace, list[float]]:
    """The parameters after so many steps, and the loss of each step."""
    helper = ModelHelper("char_lstm", seed=1, training=True)
    model.add_inputs(helper, 32, 64)
    _, loss = model.add_layers(helper)
    helper.add_gradient_operators([loss])
    Adam(0.01, max_gradient_norm=5.0).add_updates(helper)
    workspace, losses = Workspace(), []
    helper.create(workspace)
    with BatchLoader(model.windows(text, 64, 16), 32) as batches:
        for _ in range(steps):
            for name, array in next(batches).items():
                workspace.feed_blob(name, array)
            if not workspace.nets:
                workspace.create_net(helper.net, net_type, 2)
            workspace.run_net(helper.net.name)
            losses.append(float(workspace.fetch_blob(loss)))
    workspace.delete_net(helper.net.name)
    return workspace, losses


def test_windows_overlap_and_are_followed_by_their_next_characters() -> None:
    model = CharLSTM.of("abcdefgh")
    pieces = model.windows("abcdefgh", 4, 2)
    np.testing.assert_array_equal(pieces["characters"], [[0, 1, 2, 3], [2, 3, 4, 5]])
    np.testing.assert_array_equal(pieces["next"], [[1, 2, 3, 4], [3, 4, 5, 6]])


def test_a_text_shorter_than_a_window_is_refused() -> None:
    with pytest.raises(ValueError, match="a piece of 4 characters and its successor do not fit in 4 characters"):
        CharLSTM.of("abcd").windows("abcd", 4, 1)


def test_an_unknown_character_is_named() -> None:
    with pytest.raises(ValueError, match=r"the model does not know \['x', 'z'\]"):
        CharLSTM.of("abc").encode("azx")


@pytest.mark.slow
def test_the_readme_is_learnt_to_below_1_5_nats_a_character() -> None:
    text = prose()
    model = CharLSTM.of(text)
    workspace, losses = trained(model, text, 300)
    assert abs(losses[0] - np.log(len(model.characters))) < 0.3, "all characters are equally probable at first"
    assert np.mean(losses[-20:]) < 1.4
    written = model.generate(workspace, "dagexec", 200, temperature=0.5)
    words = set(re.findall(r"\w{3,}", text))
    assert sum(word in words for word in re.findall(r"\w+", written)) >= 5, f"no words of the text in {written!r}"


@pytest.mark.slow
def test_every_net_type_learns_the_same_bytes() -> None:
    text = README.read_text(encoding="utf-8")
    model = CharLSTM(CharLSTM.of(text).characters, embedding=8, hidden=16)
    expected, losses = trained(model, text, 5)
    for net_type in ("dag", "async_dag"):
        found, others = trained(model, text, 5, net_type)
        assert losses == others
        for name in ("lstm_w", "lstm_r", "lstm_b", "embedded_w", "scores_w"):
            assert found.fetch_blob(name).tobytes() == expected.fetch_blob(name).tobytes()


@pytest.mark.slow
def test_a_text_that_repeats_is_continued() -> None:
    text = "to be or not to be, " * 60
    model = CharLSTM(CharLSTM.of(text).characters, embedding=8, hidden=32)
    workspace, _ = trained(model, text, 60)
    assert model.generate(workspace, "to be or not to be, ", 40, temperature=0.3) == "to be or not to be, " * 2


@pytest.mark.parametrize(("start", "temperature"), [("", 1.0), ("a", 0.0), ("a", float("nan"))])
def test_generation_needs_a_start_and_a_temperature(start: str, temperature: float) -> None:
    with pytest.raises(ValueError, match="expected a nonempty start and a temperature above 0"):
        CharLSTM.of("ab").generate(Workspace(), start, 3, temperature=temperature)
