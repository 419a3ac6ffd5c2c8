"""Networks of the zoo, and the light models of the ONNX package with random weights, for batches of any size."""

from __future__ import annotations

from dagexec import Model, load_model, zoo
from tests.models import LIGHT_MODELS, he_normal_light_model, with_free_batch
from tests.rows.case import Subject, batch

DISTINCT = 3
"""Images that the batches of a network are made of."""

LIGHT = "light_"
NETWORKS = (*zoo.names(), *(LIGHT + name for name in LIGHT_MODELS))


def network(name: str) -> Subject:
    """One of NETWORKS: the zoo's, or with `light_` before it the ONNX package's."""
    if name.startswith(LIGHT):
        return _of_images(name, load_model(with_free_batch(he_normal_light_model(name.removeprefix(LIGHT)))))
    return _of_images(name, zoo.build(name))


def _of_images(name: str, model: Model) -> Subject:
    [(blob, info)] = model.inputs.items()
    assert info.shape is not None
    sizes = [size or 1 for size in info.shape[1:]]
    return Subject(name, model, {blob: batch(*sizes)})
