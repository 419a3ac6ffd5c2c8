"""Caffe2's recorded operators, nets and gradients: dagexec computes the same, or the difference is explained.

`tests/fixtures/caffe2_operators/explained.toml` has the differences that stay, each with its reason. What is explained
must still differ, and an operator that is called missing must still be missing.
"""

from __future__ import annotations

import re
import tomllib
from functools import cache
from pathlib import Path

import pytest

from dagexec import OperatorDef
from dagexec.core.device import Device
from dagexec.core.registry import has_engine, is_registered, registered_engines
from tests.caffe2_cases import FOLDER, recorded_cases
from tests.caffe2_replay import Outcome, replay
from tests.cuda.emulated import cuda_devices, has_compiler, has_gpu
from tests.ops.onednn.engine import needs_onednn

PARTS = 8

ON_CUDA = re.compile(r"\d+-(Batch)?Gather|\d+-Reduce(Front|Back)|\d+-(MakeTwoClass|PadImage|SumReduceLike|WeightedSum)")
"""Cases that are replayed on CUDA, too: their kernels are few, and tests of one operator do not compare with Caffe2."""


@cache
def explained(table: str, key: str, engine: str = "") -> frozenset[str]:
    """The entries of all tables of this name in the file of explanations, those of one engine."""
    tables = tomllib.loads((FOLDER / "explained.toml").read_text())[table]
    entries = [name for group in tables if group.get("engine", "") == engine for name in group[key]]
    assert len(entries) == len(set(entries)), "an entry is there twice"
    return frozenset(entries)


def check(outcomes: list[Outcome], engine: str = "") -> None:
    """Raise AssertionError for a difference that is not explained, and for an explanation of what does not differ.

    Another engine than the default one need not differ where that does.
    """
    known = explained("difference", "parts", engine)
    allowed, missing = known | explained("difference", "parts"), explained("missing", "operators")
    for outcome in outcomes:
        assert set(outcome.missing) <= missing, outcome
        assert outcome.part in allowed or not outcome.problem, outcome
        if outcome.part in known:
            assert outcome.problem, f"{outcome.part} is explained, and dagexec does what Caffe2 did"


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_dagexec_does_what_caffe2_did_but_for_what_is_explained(
    part: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for case in recorded_cases()[part::PARTS]:
        if not case.needs_objects:
            check(replay(case))


@needs_onednn
@pytest.mark.slow
def test_onednn_does_what_caffe2_did_but_for_what_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    def by_onednn(definition: OperatorDef) -> OperatorDef:
        made = OperatorDef()
        made.CopyFrom(definition)
        made.engine = "ONEDNN" if has_engine(definition.type, "ONEDNN") else ""
        return made

    for case in recorded_cases():
        if not case.needs_objects and any(has_engine(op_type, "ONEDNN") for op_type in case.types):
            check(replay(case, by_onednn), "ONEDNN")


@pytest.mark.slow
@pytest.mark.skipif(not (has_compiler() or has_gpu()), reason="the emulation of CUDA needs a compiler")
def test_cuda_does_what_caffe2_did_but_for_what_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    def on_cuda(definition: OperatorDef) -> OperatorDef:
        made = OperatorDef()
        made.CopyFrom(definition)
        if registered_engines(definition.type, "cuda"):
            made.device_option.CopyFrom(Device("cuda", 0).to_option())
        return made

    with cuda_devices():
        for case in recorded_cases():
            if ON_CUDA.match(case.name):
                check(replay(case, on_cuda), "CUDA")


def test_every_explanation_is_of_a_recorded_case() -> None:
    parts = {f"{case.name} {part}" for case in recorded_cases() for part in ("run", "gradient", "maker")}
    assert explained("difference", "parts") <= parts
    assert explained("difference", "parts", "ONEDNN") <= parts


def test_operators_that_are_called_missing_are_recorded_and_missing() -> None:
    recorded = {op_type for case in recorded_cases() for op_type in case.types}
    missing = explained("missing", "operators")
    assert missing <= recorded
    assert not {op_type for op_type in missing if is_registered(op_type)}
