"""How do I train a recurrent network?

    text -> windows -> [ embedding -> LSTM -> FC -> softmax with loss -> backward -> Adam ] -> text

Learns the characters of a text file, by default this project's README, and writes a line of its own after every epoch.
The last tenth of the text is held out: how well the model does there says what it learned, and not what it remembers.
"""

import sys
from pathlib import Path

import numpy as np

from dagexec import Workspace
from dagexec.training.data import BatchLoader
from dagexec.training.model_helper import ModelHelper
from dagexec.training.optimizer import Adam
from dagexec.zoo.char_lstm import CharLSTM

README = Path(__file__).parent.parent / "README.md"
STEPS, BATCH = 64, 32


def held_out_loss(model: CharLSTM, parameters: Workspace, text: str) -> float:
    """Nats a character of `text` with the parameters of a workspace."""
    helper = ModelHelper("held_out")
    workspace = Workspace(parameters)
    pieces = model.windows(text, STEPS, STEPS)
    model.add_inputs(helper, len(pieces["next"]), STEPS)
    _, loss = model.add_layers(helper)
    for name, array in pieces.items():
        workspace.feed_blob(name, array)
    workspace.create_net(helper.net, "simple")
    workspace.run_net(helper.net.name)
    workspace.delete_net(helper.net.name)
    return float(workspace.fetch_blob(loss))


def main(path: str = str(README), epochs: str = "12") -> None:
    """Train and print, for every epoch, nats a character of the text and of what is held out."""
    text = Path(path).read_text(encoding="utf-8")
    cut = len(text) * 9 // 10
    model = CharLSTM.of(text)
    windows = model.windows(text[:cut], STEPS, STEPS // 8)

    helper = ModelHelper("char_lstm", training=True)
    model.add_inputs(helper, BATCH, STEPS)
    _, loss = model.add_layers(helper)
    helper.add_gradient_operators([loss])
    Adam(0.01, max_gradient_norm=5.0).add_updates(helper)

    parameters = Workspace()
    helper.create(parameters)
    activations = Workspace(parameters)
    losses: list[float] = []
    count = len(windows["next"]) // BATCH
    with BatchLoader(windows, BATCH) as batches:
        for epoch in range(1, int(epochs) + 1):
            for _ in range(count):
                for name, array in next(batches).items():
                    activations.feed_blob(name, array)
                if not activations.nets:
                    activations.create_net(helper.net, "simple")
                activations.run_net(helper.net.name)
                losses.append(float(activations.fetch_blob(loss)))
            outside = held_out_loss(model, parameters, text[cut:])
            line = model.generate(parameters, "The ", 50, temperature=0.5)
            print(f"epoch {epoch}: {np.mean(losses[-count:]):.2f} nats a character, held out {outside:.2f}: {line!r}")
    print(f"below 1.5 nats a character: {np.mean(losses[-count:]) < 1.5}")


if __name__ == "__main__":
    main(*sys.argv[1:])
