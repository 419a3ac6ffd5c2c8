"""Which output of a model is an input of its next run, as far as names tell."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from dagexec.core.dtypes import FLOAT32
from dagexec.core.model import InputInfo

_DIRECTIONS = frozenset(("past", "present", "in", "out", "input", "output", "prev", "previous", "next", "new", "old"))


def states_by_name(inputs: Iterable[str], outputs: Sequence[str]) -> dict[str, str]:
    """The output that each input seems to be fed in the next run, for those that have one.

    Names agree but for words such as *past* and *present*, *in* and *out*, *new*, or a letter n behind them:
    `past_key_values.0.key` and `present.0.key`, `state` and `stateN`, `h_0` and `h_n`.
    """
    by_stem: dict[str, list[str]] = {}
    for output in outputs:
        by_stem.setdefault(_stem(output), []).append(output)
    pairs: dict[str, str] = {}
    for name in inputs:
        stem = _stem(name)
        stems = [stem, f"{stem}n", f"{stem} n", re.sub("0$", "n", stem)]
        found = {output for one in stems if stem for output in by_stem.get(one, ())}
        if len(found) == 1:
            pairs[name] = found.pop()
    times = [*pairs.values()]
    return {name: output for name, output in pairs.items() if times.count(output) == 1}


RANK = 4
"""Of caches: batch, heads, positions and elements."""


def caches_by_name(inputs: Mapping[str, InputInfo], outputs: Sequence[str]) -> dict[str, str]:
    """Those of `states_by_name` that may be caches of attention."""
    shapes = {name: info.shape for name, info in inputs.items() if info.dtype is FLOAT32 and info.shape is not None}
    names = [name for name, shape in shapes.items() if len(shape) == RANK and None in shape]
    return states_by_name(names, outputs) if names else {}


def _stem(name: str) -> str:
    words = re.findall(r"[a-z]+|\d+", re.sub("(past|present)_key_values", r"\1", name.lower()))
    return " ".join(word for word in words if word not in _DIRECTIONS)
