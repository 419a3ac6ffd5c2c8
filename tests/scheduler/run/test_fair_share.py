"""Start tags: users of a pool get equal time, and one that was idle gets no credit for it."""

from __future__ import annotations

import heapq

import pytest

from dagexec.scheduler.run.fair_share import Share


def seconds_of_each(durations: dict[str, float], total: float) -> dict[str, float]:
    """What users get of one worker if each always has four runs waiting that take so long."""
    shares = {name: Share(name) for name in durations}
    waiting = [(*share.enter(0.0), name) for name, share in shares.items() for _ in range(4)]
    heapq.heapify(waiting)
    virtual = now = 0.0
    while now < total:
        tag, advance, name = heapq.heappop(waiting)
        virtual = max(virtual, tag)
        now += durations[name]
        shares[name].charge(durations[name], advance)
        heapq.heappush(waiting, (*shares[name].enter(virtual), name))
    return {name: share.seconds for name, share in shares.items()}


def test_users_of_long_and_of_short_runs_get_equal_time() -> None:
    got = seconds_of_each({"long": 0.2, "short": 0.01, "odd": 0.03}, 60.0)
    assert [got[name] for name in ("long", "short", "odd")] == pytest.approx([20, 20, 20], abs=1.0)


def test_time_that_a_user_did_not_ask_for_is_not_made_up_for() -> None:
    busy, late = Share("busy"), Share("late")
    tag = 0.0
    for _ in range(10):
        tag, advance = busy.enter(tag)
        busy.charge(1.0, advance)
    assert late.enter(tag)[0] == tag


def test_runs_of_one_user_keep_their_order_when_less_is_charged_than_was_expected() -> None:
    share = Share("user")
    share.charge(1.0, 0.0)
    tags = [share.enter(0.0) for _ in range(3)]
    share.charge(0.0, tags[0][1])
    assert share.enter(0.0)[0] >= tags[-1][0]


def test_what_never_began_costs_nothing() -> None:
    share = Share("user")
    share.charge(1.0, 0.0)
    tag, advance = share.enter(0.0)
    share.give_back(advance)
    assert share.enter(0.0)[0] == tag
