"""How do I train a net of my own?

                     w, b            w, b
                      |               |
data --> hidden (FC, tanh) --> scores (FC) --+--> softmax, loss --> gradients --> updates of w and b
label ---------------------------------------+
"""

import numpy as np

import dagexec
from dagexec import Workspace
from dagexec.operators import INT32
from dagexec.training.model_helper import ModelHelper
from dagexec.training.optimizer import SGD

BATCH, STEPS = 32, 400

# Two arms of a spiral: no line separates them.
rng = np.random.default_rng(0)
labels = rng.integers(0, 2, 1000).astype(np.int32)
radius = rng.uniform(0.2, 2.0, 1000)
angle = 2 * radius + np.pi * labels + rng.normal(0, 0.1, 1000)
points = np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1).astype(np.float32)

helper = ModelHelper("spiral", seed=1, training=True)
data, label = helper.add_input("data", (BATCH, 2)), helper.add_input("label", (BATCH,), INT32)
hidden = helper.fc(data, "hidden", 2, 32)
hidden = helper.tanh(hidden, hidden)
softmax, loss = helper.softmax_with_loss(helper.fc(hidden, "scores", 32, 2), label)
helper.accuracy(softmax, label)

gradients = helper.add_gradient_operators([loss])
print("gradients:", ", ".join(f"{name} -> {gradient}" for name, gradient in gradients.items()))
SGD(learning_rate=0.2, momentum=0.9).add_updates(helper)

workspace = Workspace()
helper.create(workspace)  # fills the parameters
for name, shape in (("data", (BATCH, 2)), ("label", (BATCH,))):
    workspace.feed_blob(name, np.zeros(shape, np.int32 if name == "label" else np.float32))
net = helper.create_net(workspace, "dag", num_workers=2)
for step in range(STEPS):
    batch = rng.integers(0, 800, BATCH)
    workspace.feed_blob("data", points[batch])
    workspace.feed_blob("label", labels[batch])
    net.run()
    if step % 100 == 0:
        print(f"step {step}: loss {float(workspace.fetch_blob(loss)):.3f}")
net.close()

model = helper.predict_model(workspace, [softmax], shapes={"data": (None, 2)})
with dagexec.compile(model) as executor:
    found = executor.run({"data": points[800:]})[softmax].argmax(axis=1)
print(f"right on new points, at least 95 of 100: {np.mean(found == labels[800:]) >= 0.95}")
