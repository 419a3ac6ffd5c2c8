"""The onnx package's suite for backends: every case passes, or is excluded with its reason in `exclusions.toml`."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from tests.frontend.suite.cases import Case, all_cases, exclusions

PARTS = 24
OPTIONS: Mapping[str, Mapping[str, object]] = {
    "optimized": {},
    "as given, two workers": {"optimize": False, "net_type": "dag", "num_workers": 2},
}


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    return all_cases()


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_cases_pass_or_are_excluded(cases: list[Case], part: int) -> None:
    """Each case runs optimized, and every fourth as given on two workers; one that is excluded must not pass."""
    excluded = exclusions()
    wrong = []
    for index, case in enumerate(cases[part::PARTS]):
        way = "as given, two workers" if index % 4 == 0 else "optimized"
        outcome = case.run(**OPTIONS[way])
        if outcome.result == "broken" or (outcome.result == "passed") == (case.name in excluded):
            wrong.append(f"{case.name} ({way}): {outcome}")
    assert wrong == []


@pytest.mark.slow
def test_the_excluded_are_few_and_exist(cases: list[Case]) -> None:
    """At least 97% of the ordinary cases of the default domain pass, and 90% of all."""
    excluded = exclusions()
    assert set(excluded) - {case.name for case in cases} == set()
    assert all(excluded.values())
    ordinary = [case for case in cases if case.is_ordinary()]
    assert sum(case.name in excluded for case in ordinary) <= 0.03 * len(ordinary)
    assert len(excluded) <= 0.1 * len(cases)
