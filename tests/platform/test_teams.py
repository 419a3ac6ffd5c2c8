from __future__ import annotations

import threading

import pytest

import dagexec
from dagexec.platform import teams


@pytest.fixture
def released(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The threads that let go of a team, with no others' teams about."""
    found: list[int] = []
    monkeypatch.setattr(teams, "_owners", {})
    monkeypatch.setattr(teams, "_releases", [lambda: found.append(threading.get_ident())])
    return found


def test_a_thread_alone_keeps_its_team(released: list[int]) -> None:
    teams.enter()
    teams.leave_to_others()
    assert released == []


def test_an_idle_thread_is_woken_and_lets_go_when_another_has_a_team(released: list[int]) -> None:
    woken, entered = threading.Event(), threading.Event()
    idents: list[int] = []

    def idle_worker() -> None:
        idents.append(threading.get_ident())
        teams.enter(woken.set)
        teams.leave_to_others()
        entered.set()
        woken.wait()
        teams.leave_to_others()

    thread = threading.Thread(target=idle_worker)
    thread.start()
    entered.wait()
    teams.enter()
    thread.join()
    assert released == idents
    teams.leave_to_others()
    assert released == idents  # nobody else has one any more


def test_a_thread_that_ended_has_no_team(released: list[int]) -> None:
    thread = threading.Thread(target=teams.enter)
    thread.start()
    thread.join()
    teams.enter()
    teams.leave_to_others()
    assert released == []


def test_leaving_is_for_any_thread(released: list[int]) -> None:
    teams.leave()
    assert released == [threading.get_ident()]


def test_a_team_is_kept_off_the_core_of_its_thread_and_told_only_what_is_new(
    released: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[int, set[int]]] = []
    monkeypatch.setattr(teams, "_restricts", [lambda *what: told.append(what)])
    monkeypatch.setattr(teams, "_here", teams._Here())
    monkeypatch.setattr(teams.os, "sched_getaffinity", lambda _thread: {0, 1, 2, 5}, raising=False)
    teams.keep_off(1, 2)
    teams.keep_off(1, 2)
    assert told == [(2, {0, 2, 5})]
    teams.keep_off(1, 3)
    teams.keep_off(5, 2)
    assert told[1:] == [(3, {0, 2, 5}), (2, {0, 1, 2})]
    teams.leave()
    teams.keep_off(5, 4)
    teams.keep_off(5, 5)  # four others, and three cores
    assert told[3:] == [(4, {0, 1, 2})]


def test_the_thread_that_warms_an_executor_up_keeps_no_team(released: list[int]) -> None:
    with dagexec.compile("zoo:lenet") as executor:
        released.clear()
        executor.warm_up()
        assert threading.get_ident() in released
