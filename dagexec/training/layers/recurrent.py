"""Recurrent layers."""

from __future__ import annotations

from dagexec.training.model_builder import ModelBuilder


class RecurrentLayers(ModelBuilder):
    """Recurrent layers."""
