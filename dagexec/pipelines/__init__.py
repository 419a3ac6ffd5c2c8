"""Pipelines: models and Python steps put together to one Model (`pipeline.py`).

They may be described by data (`description.py`), which a file holds (`loading.py`). `stage.py` says what stages and the
values between them are, `stage_types.py` finds and compares types where stages are connected, and `merging.py` makes
the one net.
"""

from dagexec.pipelines.loading import load_pipeline
from dagexec.pipelines.pipeline import Pipeline
from dagexec.pipelines.stage import Stage, Value

__all__ = ["Pipeline", "Stage", "Value", "load_pipeline"]
