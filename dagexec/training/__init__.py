"""Training nets: gradients, parameter updates, trainer, checkpoints and data (docs/training.md)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dagexec.building import fillers
from dagexec.platform.lazy import lazy_names

if not TYPE_CHECKING:
    __getattr__ = lazy_names(__name__, {"dagexec.training.fine_tuning": ("add_model", "fine_tune")})
else:
    from dagexec.training.fine_tuning import add_model, fine_tune

__all__ = ["add_model", "fillers", "fine_tune"]
