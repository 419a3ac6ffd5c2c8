"""How do I train on several devices, and is it the same as on one?

batch -+-> replica cpu_0 -> gradients -+        +-> update
       |                               +-> sum -+
       +-> replica cpu_1 -> gradients -+        +-> update

A device may be `cpu` (several times), `sim:N` or `cuda:N`.
"""

import numpy as np

from dagexec.operators import INT32
from dagexec.training.data_parallel import parallelize
from dagexec.training.model_helper import ModelHelper
from dagexec.training.optimizer import SGD


def build_inputs(helper: ModelHelper) -> None:
    """Eight features and one of two classes."""
    helper.add_input("data", (None, 8))
    helper.add_input("label", (None,), INT32)


def build_forward(helper: ModelHelper) -> str:
    """Two layers and a loss."""
    hidden = helper.relu(helper.fc("data", "fc1", 8, 32), "relu1")
    _, loss = helper.softmax_with_loss(helper.fc(hidden, "fc2", 32, 2), "label")
    return loss


def train(devices: list[str], reduction: str = "allreduce", iter_size: int = 1) -> dict[str, np.ndarray]:
    """Thirty steps; returns the parameters."""
    random = np.random.default_rng(0)
    optimizer = SGD(0.1, momentum=0.9)
    with parallelize(
        build_inputs, build_forward, optimizer, devices=devices, reduction=reduction, iter_size=iter_size
    ) as model:
        for _ in range(30):
            data = random.standard_normal((64, 8)).astype(np.float32)
            losses = model.step({"data": data, "label": (data.sum(axis=1) > 0).astype(np.int32)})
        print(f"{reduction:9} on {', '.join(devices)}: loss {losses['loss']:.6f}")
        return model.parameters()


def main() -> None:
    """The same training in five ways."""
    one = train(["cpu"], iter_size=4)  # a batch in four parts, one after the other
    same = True
    for devices in (["cpu"] * 4, ["sim:0", "sim:1", "sim:2", "sim:3"]):
        for reduction in ("allreduce", "tree"):
            found = train(devices, reduction)
            same = same and all(found[name].tobytes() == array.tobytes() for name, array in one.items())
    print(f"same bytes: {same}")


if __name__ == "__main__":
    main()
