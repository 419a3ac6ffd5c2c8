"""Every state of small worlds around the machine of a deployment, and the mistakes in it that these find."""

from __future__ import annotations

import pytest

from dagexec.cluster.autoscaling import Autoscaling
from dagexec.cluster.routing import LeastOutstanding
from dagexec.cluster.state import DeploymentState
from tests.machines.cluster_world import Kind, Setting
from tests.machines.worlds import searched, with_other_futures
from tests.planted.bug import Edit, edited

PLAIN = Kind()
ONE_OR_TWO = Autoscaling(min_replicas=1, max_replicas=2, target_outstanding=1, downscale_seconds=1)
TWO_EACH = Autoscaling(min_replicas=1, max_replicas=2, target_outstanding=2, downscale_seconds=1)

SMALL = {
    "a replica dies": Setting(1, (PLAIN, Kind(priority=1)), max_queued=1, deaths=1, cancels=False),
    "no request runs again": Setting(1, (PLAIN,), retries=False, deaths=1),
    "what was not sent": Setting(1, (PLAIN,) * 3, max_outstanding=2, retries=False, deaths=1, cancels=False),
    "a replica does not start": Setting(1, (PLAIN,), refusals=1, doubles=1, for_good=True),
    "closing": Setting(1, (PLAIN,), deaths=1, closes=True),
    "more and fewer": Setting(0, (PLAIN, PLAIN), autoscaling=ONE_OR_TWO, cancels=False),
}

LARGE = {
    "one of two dies": Setting(2, (PLAIN, PLAIN, Kind(priority=1)), max_queued=1, deaths=1),
    "two die": Setting(2, (PLAIN, Kind(timeout=1)), max_outstanding=2, deaths=2),
    "no request of two runs again": Setting(2, (PLAIN, Kind(timeout=1)), max_outstanding=2, retries=False, deaths=2),
    "two of three were sent": Setting(1, (PLAIN,) * 3, max_outstanding=2, deaths=1),
    "a replica falls silent": Setting(1, (PLAIN,), answer_seconds=2, silences=1),
    "two fall silent": Setting(2, (PLAIN, PLAIN), answer_seconds=2, silences=2, cancels=False),
    "messages come twice": Setting(1, (PLAIN, PLAIN), deaths=1, doubles=2, cancels=False),
    "closing while one dies": Setting(2, (PLAIN, PLAIN), deaths=1, closes=True),
    "more and fewer that die": Setting(0, (PLAIN, PLAIN, PLAIN), autoscaling=ONE_OR_TWO, deaths=1),
    "fewer that are busy": Setting(0, (PLAIN,) * 3, max_outstanding=2, autoscaling=TWO_EACH, cancels=False),
}
WORLDS = SMALL | LARGE


@pytest.mark.parametrize("name", SMALL)
def test_nothing_goes_wrong_in_a_small_world(name: str) -> None:
    found = searched(SMALL[name].world)
    assert (found.fault, found.path) == (None, ())
    assert found.exhausted


@pytest.mark.slow
@pytest.mark.parametrize("name", LARGE)
def test_nothing_goes_wrong_in_a_larger_world(name: str) -> None:
    found = searched(LARGE[name].world, seconds=10)
    assert (found.fault, found.path) == (None, ())


@pytest.mark.slow
@pytest.mark.parametrize("name", LARGE)
def test_what_has_one_state_has_one_future(name: str) -> None:
    assert with_other_futures(LARGE[name].world, 150) == []


MISTAKES = {
    "requests of a lost replica are dropped": (
        "a replica dies", "a request is lost, or in two places",
        Edit(DeploymentState._retry, "            self.again.append(request)\n", ""),
    ),
    "a lost replica does not start again": (
        "a replica dies", "somebody waits for ever",
        Edit(DeploymentState._lose, "        self.instructions.append(Start(member, member.life))\n", ""),
    ),
    "a lost replica is up for the router": (
        "a replica dies", "the machine fails: ValueError: replica 0 is there already",
        Edit(DeploymentState._lose, "        self._router.remove(member.number)\n", ""),
    ),
    "a request runs again and again": (
        "no request runs again", "a request is run too often",
        Edit(DeploymentState._retry, "if not self._retries", "if False"),
    ),
    "what ended an earlier life ends this one": (
        "messages come twice", "a replica is lost that is well",
        Edit(DeploymentState.lost, "member.life == attempt.life and ", ""),
    ),
    "an answer to an earlier attempt ends the request, and the next one does": (
        "one of two dies", "a request ends twice",
        Edit(DeploymentState.answered, "if self.attempts.get(attempt.request) is attempt", "if True"),
    ),
    "a replica that is given up may be given up once more": (
        "a replica does not start", "the machine fails: KeyError",
        Edit(DeploymentState.failed_to_start, "self.failure, member.phase = error, Phase.LEAVING\n"
            "        self._end_if_idle(member)", "self.failure = error\n        del self.members[member.number]",
        ),
    ),
    "a replica has more than it may": (
        "a replica dies", "a replica has too many requests",
        Edit(LeastOutstanding._choose, ">= self.max_outstanding", "> self.max_outstanding"),
    ),
    "a free place goes to nobody": (
        "a replica dies", "somebody waits although a replica has room",
        Edit(DeploymentState.answered, "        self._send(now)\n", ""),
    ),
    "those who wait for a replica that does not start are left": (
        "a replica does not start", "somebody waits although no replica will come",
        Edit(DeploymentState.failed_to_start, "if not self._may_serve()", "if False"),
    ),
    "a silent replica is never lost": (
        "a replica falls silent", "it looks again at once",
        Edit(DeploymentState.keep_time, "if now >= member.asked + self._patience", "if False"),
    ),
    "a silent replica is not asked": (
        "a replica falls silent", "a replica is lost that was not asked",
        Edit(DeploymentState._watch, "                self.instructions.append(Ask(member, member.life))\n", ""),
    ),
    "what was not sent counts as lost": (
        "two of three were sent", "a replica has too many requests",
        Edit(DeploymentState._lose, "if not attempt.is_sent and", "if False and"),
    ),
    "a request is sent to a replica that was lost": (
        "what was not sent", "a request is run too often",
        Edit(DeploymentState.may_send, "self.attempts.get(attempt.request) is attempt", "True"),
    ),
    "who is left when all end is not ended": (
        "closing", "a replica leaves and has nothing to do",
        Edit(DeploymentState.end_members, "            self._end_if_idle(member)\n", ""),
    ),
    "a replica that leaves stays when it has answered": (
        "fewer that are busy", "a replica leaves and has nothing to do",
        Edit(DeploymentState.answered, "        self._end_if_idle(attempt.member)\n", ""),
    ),
}  # fmt: skip


LATER = {"what was not sent counts as lost", "a replica that leaves stays when it has answered"}
"""Those found after so many states that it takes a while."""


@pytest.mark.parametrize("name", [pytest.param(one, marks=[pytest.mark.slow] * (one in LATER)) for one in MISTAKES])
def test_a_mistake_in_the_machine_is_found(name: str) -> None:
    world, fault, mistake = MISTAKES[name]
    with edited((mistake,)):
        found = searched(WORLDS[world].world)
    assert found.fault is not None
    assert fault in found.fault
