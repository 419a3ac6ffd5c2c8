"""The models of `models.py` in six families, at the sizes at which they are used: a module for each family.

A module's `nets()` says what its files are without making them. Weights are random with a fixed seed, or the trained
ones that a package carries.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

FAMILIES = ("cnn_old", "cnn_modern", "dense", "encoder", "decoder", "recurrent")
BATCHES = (1, 8)
"""The rows of a run: the feeds of a model are stored in this order."""


def net_named(name: str) -> Any:
    """The net `family/name`; its module is imported, which needs what its files are made with."""
    family, _, short = name.partition("/")
    [net] = [net for net in import_module(f"families.{family}").nets() if net.name == short]
    return net
