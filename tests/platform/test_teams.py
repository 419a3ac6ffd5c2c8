from __future__ import annotations

import threading

import pytest

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
