"""The output of `--json`: one line of strict JSON, without NaN and infinities."""

from __future__ import annotations

import json
import math


def print_json(content: object) -> None:
    """Print `content` as JSON. A NaN or an infinity becomes the string "NaN", "Infinity" or "-Infinity"."""
    print(json.dumps(_strict(content), allow_nan=False))


def _strict(value: object) -> object:
    if isinstance(value, dict):
        return {key: _strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value
