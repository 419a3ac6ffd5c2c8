"""A local Ray cluster for the tests of this folder that ask for one, and for nothing else."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session")
def cluster() -> Iterator[None]:
    """One that exists before anything is deployed, with room for eight replicas."""
    ray = pytest.importorskip("ray")
    folder = tempfile.mkdtemp(prefix="dagexec-ray-")
    quiet = {"include_dashboard": False, "log_to_driver": False, "logging_level": "ERROR"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        ray.init("local", num_cpus=8, object_store_memory=300 << 20, _temp_dir=folder, **quiet)
    try:
        yield
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)
