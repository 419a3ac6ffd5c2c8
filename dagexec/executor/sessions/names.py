"""Which output of a model is an input of its next run, as far as names tell."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

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


def _stem(name: str) -> str:
    words = re.findall(r"[a-z]+|\d+", re.sub("(past|present)_key_values", r"\1", name.lower()))
    return " ".join(word for word in words if word not in _DIRECTIONS)
