"""Caffe2's recorded operators, nets and gradients: dagexec computes the same, or the difference is explained.

`tests/fixtures/caffe2_operators/explained.toml` has the differences that stay, each with its reason. What is explained
must still differ, and an operator that is called missing must still be missing.
"""

from __future__ import annotations

import tomllib
from functools import cache
from pathlib import Path

import pytest

from dagexec.core.registry import is_registered
from tests.caffe2_cases import FOLDER, recorded_cases
from tests.caffe2_replay import replay

PARTS = 8


@cache
def explained(table: str, key: str) -> frozenset[str]:
    """The entries of all tables of this name in the file of explanations."""
    entries = [name for group in tomllib.loads((FOLDER / "explained.toml").read_text())[table] for name in group[key]]
    assert len(entries) == len(set(entries)), "an entry is there twice"
    return frozenset(entries)


@pytest.mark.parametrize("part", range(PARTS))
def test_dagexec_does_what_caffe2_did_but_for_what_is_explained(
    part: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    known, missing = explained("difference", "parts"), explained("missing", "operators")
    for case in recorded_cases()[part::PARTS]:
        if case.needs_objects:
            continue
        for outcome in replay(case):
            assert set(outcome.missing) <= missing, outcome
            if outcome.part in known:
                assert outcome.problem, f"{outcome.part} is explained, and dagexec does what Caffe2 did"
            assert outcome.part in known or not outcome.problem, outcome


def test_every_explanation_is_of_a_recorded_case() -> None:
    parts = {f"{case.name} {part}" for case in recorded_cases() for part in ("run", "gradient", "maker")}
    assert explained("difference", "parts") <= parts


def test_operators_that_are_called_missing_are_recorded_and_missing() -> None:
    recorded = {op_type for case in recorded_cases() for op_type in case.types}
    missing = explained("missing", "operators")
    assert missing <= recorded
    assert not {op_type for op_type in missing if is_registered(op_type)}
