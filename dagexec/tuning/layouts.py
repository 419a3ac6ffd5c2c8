"""The layout of a net's images, by measurement: the whole net is run in each, and the fastest is kept.

No rule from single operators says which is best: Winograd's convolutions want NCHW16c, depthwise ones and odd numbers
of channels NHWC, and every Reorder between them costs.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence

from dagexec.core.deadline import Deadline
from dagexec.core.model import Model
from dagexec.core.proto import NetDef
from dagexec.tuning.bench import Measures
from dagexec.tuning.runner import Trial

logger = logging.getLogger("dagexec")

_GAIN = 0.98  # a later layout must take at most this part of the time of an earlier one: measured times vary


def fastest_layout(
    names: Sequence[str],
    laid_out: Callable[[str], Model],
    measures: Measures,
    seconds: float,
    deadline: Deadline,
    trial: Callable[[Model], Trial] = Trial,
) -> str | None:
    """Which of `names` makes a run fastest; None when the net runs in none. The first is kept unless one gains enough.

    `laid_out` gives the net in a layout, and `trial` how it is run. Layouts that give the same net are run once. Nets
    that could not be made before `deadline`, to judge by how long the one before took, are left out.
    """
    trials: dict[bytes, tuple[str, Trial]] = {}
    took = 0.0
    for name in names:
        left = deadline.left()
        if trials and left < took:
            break
        model = laid_out(name)
        took = left - deadline.left()
        trials.setdefault(fingerprint(model.net), (name, trial(model)))
    times = measures.run_seconds([one for _, one in trials.values()], seconds)
    measured = dict(zip((name for name, _ in trials.values()), times, strict=True))
    logger.info("layouts: %s", ", ".join(f"{name} {time * 1e3:.3f} ms" for name, time in measured.items()))
    best = None
    for name, time in measured.items():
        if math.isfinite(time) and (best is None or time < _GAIN * measured[best]):
            best = name
    return best


def fingerprint(net: NetDef) -> bytes:
    """Bytes that are the same for the same net."""
    return net.SerializeToString(deterministic=True)
