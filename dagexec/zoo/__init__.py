"""Well-known architectures with synthetic weights, for examples, tests and benchmarks.

Layers and sizes are those of the papers named in each module. Weights are not trained: they are random, reproducible
from a seed, and sized so that activations stay finite and the result is not saturated.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable

from dagexec.core.errors import ModelFormatError
from dagexec.core.model import Model
from dagexec.zoo import densenet, googlenet, inception_v3, lenet, mobilenet, nasnet, resnet, squeezenet, vgg

Builder = Callable[[int, int], Model]

_BUILDERS: dict[str, Builder] = {
    "densenet121": densenet.densenet121,
    "googlenet": googlenet.googlenet,
    "inception_v3": inception_v3.inception_v3,
    "lenet": lenet.lenet,
    "mobilenet_v2": mobilenet.mobilenet_v2,
    "nasnet_a": nasnet.nasnet_a,
    "resnet50": resnet.resnet50,
    "squeezenet": squeezenet.squeezenet,
    "squeezenet_towers": squeezenet.squeezenet_towers,
    "vgg19": vgg.vgg19,
}

__all__ = ["build", "names"]


def names() -> list[str]:
    """The models `build` knows, sorted."""
    return sorted(_BUILDERS)


def build(name: str, batch_size: int = 1, seed: int = 0) -> Model:
    """The model `name` with input `data` (batch_size x channels x height x width) and output `softmax`.

    Raises ModelFormatError, suggesting close names, when there is no such model, or for a batch size below 1.
    """
    builder = _BUILDERS.get(name)
    if builder is None:
        close = difflib.get_close_matches(name, _BUILDERS, n=3)
        hint = f"did you mean {' or '.join(close)}?" if close else f"known: {', '.join(names())}"
        raise ModelFormatError(f"the zoo has no model {name!r}; {hint}")
    if batch_size < 1:
        raise ModelFormatError(f"zoo model {name!r}: the batch size must be at least 1, found {batch_size}")
    return builder(batch_size, seed)
