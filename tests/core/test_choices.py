"""Choices by measurement: within a budget, once for a key, kept in a file that may be damaged without harm."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dagexec.core import choices as module
from dagexec.core.choices import (
    Choices,
    cache_file,
    choices,
    choose,
    load_choices,
    measuring,
    postponed,
    save_choices,
    seconds_left,
)
from dagexec.errors import ModelFormatError, UnsupportedFeatureError


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The cache file, which does not exist yet."""
    path = tmp_path / "folder" / "choices.json"
    monkeypatch.setenv("DAGEXEC_CHOICES", str(path))
    choices.forget()
    yield path
    choices.forget()


class Measure:
    """A measurement that takes as long as the test says, by a clock that it moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.left: list[float] = []
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)

    def __call__(self, seconds: float, choice: str = "fast", takes: float = 1.0) -> str:
        self.left.append(seconds)
        self.now += takes
        return choice


@pytest.fixture
def measure(monkeypatch: pytest.MonkeyPatch) -> Measure:
    return Measure(monkeypatch)


def test_nothing_is_measured_without_a_budget(file: Path, measure: Measure) -> None:
    assert choose("a", measure) is None
    with measuring(0):
        assert choose("a", measure) is None
    assert measure.left == []
    assert not file.exists()


def test_a_key_is_measured_once_and_known_afterwards(file: Path, measure: Measure) -> None:
    with measuring(10):
        assert [choose("a", measure), choose("a", measure)] == ["fast", "fast"]
    assert choose("a", measure) == "fast"
    assert len(measure.left) == 1
    assert choices.all() == {"a": "fast"}


def test_a_budget_that_is_used_up_measures_no_more(file: Path, measure: Measure) -> None:
    with measuring(2.5):
        found = [choose(key, measure) for key in "abcd"]
        assert seconds_left() < 0
    assert found == ["fast", "fast", "fast", None]
    assert measure.left == [2.5, 1.5, 0.5]
    assert seconds_left() == 0


def test_a_block_within_another_has_no_more_time_than_that_has_left(file: Path, measure: Measure) -> None:
    with measuring(4):
        with measuring(1.5):
            assert [choose(key, measure) for key in "abc"] == ["fast", "fast", None]
        assert seconds_left() == 2
        with measuring(10):
            assert seconds_left() == 2
    assert measure.left == [1.5, 0.5]


def test_a_thread_has_only_the_time_that_it_was_given(file: Path, measure: Measure) -> None:
    found: list[str | None] = []
    with measuring(10):
        thread = threading.Thread(target=lambda: found.append(choose("a", measure)))
        thread.start()
        thread.join(30)
    assert found == [None]
    assert measure.left == []


def test_what_is_postponed_is_measured_the_weightiest_first(file: Path, measure: Measure) -> None:
    order: list[str] = []

    def noting(name: str) -> module.Measure:
        def measured(seconds: float) -> str:
            order.append(name)
            return measure(seconds)

        return measured

    with measuring(2):
        with postponed() as measure_all:
            for name, weight in (("small", 1.0), ("often", 2.0), ("large", 3.0), ("often", 2.0)):
                assert choose(name, noting(name), weight=weight) is None
        assert order == []
        assert not measure_all(), "the third would be beyond the budget"
    assert order == ["often", "large"]
    assert choices.all() == {"often": "fast", "large": "fast"}


def test_what_turns_out_to_be_unsupported_does_not_keep_the_rest_from_being_measured(
    file: Path, measure: Measure
) -> None:
    def unsupported(_seconds: float) -> str:
        raise UnsupportedFeatureError("only a reference")

    with measuring(9):
        with postponed() as measure_all:
            choose("first", unsupported, weight=2.0)
            choose("second", measure, weight=1.0)
        assert measure_all()
    assert choices.all() == {"second": "fast"}


def test_postponing_ends_with_its_block(file: Path, measure: Measure) -> None:
    with measuring(2):
        with postponed() as measure_all:
            pass
        assert measure_all()
        assert choose("a", measure) == "fast"


def test_a_measurement_that_finds_nothing_keeps_nothing(file: Path) -> None:
    with measuring(60):
        assert choose("a", lambda seconds: None) is None
        assert choices.all() == {}
        assert choose("a", lambda seconds: "fast") == "fast"


def test_the_choice_for_the_nearest_batch_is_found(file: Path) -> None:
    for key, name in (("a | batch 1", "one"), ("a | batch 16", "many"), ("b | batch 8", "other"), ("a", "none")):
        choices.keep(key, name)
    assert choices.near("a | batch 8") == "many"
    assert choices.near("a | batch 3") == "one"
    assert choices.near("c | batch 8") is None
    assert choices.near("a") is None


def test_a_measurement_that_fails_is_paid_for_and_not_kept(file: Path, measure: Measure) -> None:
    def fails(seconds: float) -> str:
        measure(seconds)
        raise ValueError("no")

    with measuring(5):
        with pytest.raises(ValueError, match="no"):
            choose("a", fails)
        assert seconds_left() == 4
    assert choices.all() == {}


def test_one_thread_measures_and_the_others_take_its_choice(file: Path) -> None:
    inside, count = threading.Event(), []
    go_on = threading.Event()

    def measure(_seconds: float) -> str:
        count.append(1)
        inside.set()
        assert go_on.wait(30)
        return f"choice {len(count)}"

    found: list[str | None] = []

    def compile_something() -> None:
        with measuring(60):
            found.append(choose("a", measure))

    threads = [threading.Thread(target=compile_something) for _ in range(3)]
    for thread in threads:
        thread.start()
    assert inside.wait(30)
    go_on.set()
    for thread in threads:
        thread.join(30)
    assert found == ["choice 1"] * 3


def test_what_was_measured_is_there_in_the_next_process(file: Path, measure: Measure) -> None:
    with measuring(10):
        choose("a", measure)
    assert json.loads(file.read_text())["choices"] == {"a": "fast"}
    choices.forget()
    assert choose("a", measure) == "fast"
    assert len(measure.left) == 1


def test_choices_of_another_process_stay_in_the_file(file: Path, measure: Measure) -> None:
    with measuring(10):
        choose("a", measure)
        other = Choices()
        other.keep("b", "other")
        other.flush()
        assert not choices.find("b")
    assert json.loads(file.read_text())["choices"] == {"a": "fast", "b": "other"}


BROKEN = {
    "not JSON": b"{",
    "not text": b"\xff\xfe\x00\x80",
    "another file": b'{"choices": {}}',
    "another version": b'{"format": "dagexec choices", "version": 2, "choices": {}}',
    "a list": b'{"format": "dagexec choices", "version": 1, "choices": ["a"]}',
    "numbers": b'{"format": "dagexec choices", "version": 1, "choices": {"a": 1}}',
    "too deep": b"[" * 100_000,
    "empty": b"",
}


@pytest.mark.parametrize("content", BROKEN.values(), ids=BROKEN)
def test_a_damaged_cache_is_warned_of_and_replaced(
    file: Path, measure: Measure, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    file.parent.mkdir()
    file.write_bytes(content)
    with caplog.at_level(logging.WARNING, "dagexec"):
        assert choose("a", measure) is None
    assert len(caplog.messages) == 1
    assert "the cache of choices is not used" in caplog.messages[0]
    assert str(file) in caplog.messages[0]
    with measuring(1):
        assert choose("a", measure) == "fast"
    assert json.loads(file.read_text())["choices"] == {"a": "fast"}


@pytest.mark.parametrize("content", BROKEN.values(), ids=BROKEN)
def test_a_damaged_file_that_the_caller_names_is_an_error(file: Path, tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "named.json"
    path.write_bytes(content)
    with pytest.raises(ModelFormatError, match=r"named\.json"):
        load_choices(path)
    assert choices.all() == {}


def test_a_cache_that_cannot_be_written_is_warned_of(
    file: Path, measure: Measure, caplog: pytest.LogCaptureFixture
) -> None:
    file.parent.write_text("a file where the folder should be")
    with caplog.at_level(logging.WARNING, "dagexec"), measuring(1):
        assert choose("a", measure) == "fast"
    assert "choices are not saved" in caplog.messages[-1]
    assert choose("a", measure) == "fast"


def test_given_choices_go_before_measured_ones(file: Path, tmp_path: Path, measure: Measure) -> None:
    with measuring(1):
        choose("a", measure)
    named = tmp_path / "named.json"
    assert save_choices(named) == 1
    named.write_text(named.read_text().replace("fast", "faster"))
    assert choices.find("a", given_only=True) is None
    assert load_choices(named) == 1
    assert choices.find("a") == choices.find("a", given_only=True) == "faster"
    assert choices.all() == {"a": "faster"}


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DAGEXEC_CHOICES", "off")
    assert cache_file() is None
    monkeypatch.setenv("DAGEXEC_CHOICES", "some/file")
    assert cache_file() == Path("some/file")
    monkeypatch.delenv("DAGEXEC_CHOICES")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_file() == tmp_path / "dagexec" / "choices.json"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_file() == tmp_path / ".cache" / "dagexec" / "choices.json"


def test_switched_off_nothing_is_read_or_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, measure: Measure
) -> None:
    monkeypatch.setenv("DAGEXEC_CHOICES", "off")
    monkeypatch.chdir(tmp_path)
    choices.forget()
    with measuring(1):
        assert choose("a", measure) == "fast"
    assert list(tmp_path.iterdir()) == []
    choices.forget()
    assert choices.all() == {}
