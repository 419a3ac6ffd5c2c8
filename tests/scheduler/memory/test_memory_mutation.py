"""Wrong memory plans: whatever is put where it must not be, the static proof rejects it."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import numpy as np
import pytest

from dagexec import NetDef, Workspace
from dagexec.scheduler.hazards import check_net
from dagexec.scheduler.memory import arena, plan
from dagexec.scheduler.memory.offsets import BufferOffsets, Conflicting, place
from dagexec.scheduler.nets.dag import DAGNet
from dagexec.scheduler.nets.simple import SimpleNet
from tests.ops.running import operator_def
from tests.scheduler.memory.test_memory_nets import KINDS, Make, make, memory_of, random_net, two_users, workspace_for


class Misplacing:
    """A `place` that puts the first of two buffers where the second is."""

    def __init__(self, pair: tuple[int, int] | None = None) -> None:
        self.pair = pair
        self.conflicting: Conflicting | None = None

    def __call__(
        self, sizes: Sequence[int], conflicting: Conflicting, bound: int = 0, *_order: object
    ) -> BufferOffsets:
        """What `place` finds, with that one mistake."""
        self.conflicting = conflicting
        found = place(sizes, conflicting, bound)
        if self.pair is None:
            return found
        offsets = found.offsets.copy()
        offsets[self.pair[0]] = offsets[self.pair[1]]
        return BufferOffsets(offsets, int((offsets + np.array(sizes) + 64).max()))


def sums(rng: random.Random, count: int) -> tuple[NetDef, frozenset[str]]:
    """Sums of earlier blobs; what nobody reads is kept, so that all values matter."""
    operators, read = [], set()
    for index in range(count):
        sources = sorted({f"b{rng.randrange(index)}" for _ in range(rng.randint(1, 2))}) if index else ["x"]
        read.update(sources)
        operators.append(operator_def("Sum" if len(sources) > 1 else "Relu", sources, [f"b{index}"]))
    return NetDef(name="sums", op=operators), frozenset({f"b{i}" for i in range(count)} - read)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(5))
def test_two_buffers_in_use_at_one_time_on_the_same_bytes_are_found(
    kind: Make, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    definition, keep = sums(random.Random(seed), 8)
    found = tried = 0
    for pair in itertools.permutations(range(8), 2):
        misplacing = Misplacing(pair)
        monkeypatch.setattr(plan, "place", misplacing)
        workspace = Workspace()
        workspace.feed_blob("x", np.ones(100, np.float32))
        with make(kind, definition, workspace, 2, keep) as net:
            proof = check_net(net)
            assert misplacing.conflicting is not None
            if pair[1] in misplacing.conflicting(pair[0]):
                tried += 1
                found += not proof.holds
    assert found == tried > 10


def test_a_finding_names_the_blob_its_reader_and_who_wrote_there(monkeypatch: pytest.MonkeyPatch) -> None:
    definition = NetDef(
        name="n",
        op=[
            operator_def("Relu", ["x"], ["a"]),
            operator_def("Relu", ["x"], ["b"]),
            operator_def("Sum", ["a", "b"], ["y"]),
        ],
    )
    monkeypatch.setattr(plan, "place", Misplacing((0, 1)))
    workspace = Workspace()
    workspace.feed_blob("x", np.ones(10, np.float32))
    with SimpleNet(definition, workspace, keep=frozenset({"y"})) as net:
        proof = check_net(net)
    assert not proof.unordered
    [found] = proof.overwritten
    assert str(found) == (
        "blob 'a' is overwritten before Sum 'y' (operator 2) of net 'n': by Relu 'b' (operator 1) of net 'n', "
        "with blob 'b'"
    )


def test_a_kept_blob_that_does_not_survive_the_run_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    definition = NetDef(name="n", op=[operator_def("Relu", [f"b{i}"], [f"b{i + 1}"]) for i in range(4)])
    monkeypatch.setattr(plan, "place", Misplacing((0, 3)))
    workspace = Workspace()
    workspace.feed_blob("b0", np.ones(10, np.float32))
    with DAGNet(definition, workspace, num_workers=2, keep=frozenset({"b1", "b4"})) as net:
        lost = {(found.blob, found.reader) for found in check_net(net).overwritten}
    assert ("blob 'b1'", "the end of the run") in lost


@pytest.mark.parametrize("kind", KINDS)
def test_working_memory_on_a_buffer_in_use_is_found(kind: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena, "best_fit", lambda *_: 0)
    definition, workspace = two_users()
    with make(kind, definition, workspace, 2, frozenset({"xy", "zy"})) as net:
        proof = check_net(net)
        assert memory_of(net).unshared_working_bytes
    assert not proof.holds
    assert any("working memory" in str(found) for found in (*proof.unordered, *proof.overwritten))


@pytest.mark.slow
def test_most_single_mistakes_in_random_nets_with_views_and_joined_blobs_are_found() -> None:
    """Not all matter: two outputs that nobody reads may lie anywhere; but what changes a result is found."""
    wrong = 0
    for seed in range(12):
        rng = random.Random(seed)
        definition, keep = random_net(rng, 6)
        expected = _outcome(definition, keep, None, seed)
        count = expected[2]
        for _ in range(6):
            if count < 2:
                break
            pair = (rng.randrange(count), rng.randrange(count))
            if pair[0] == pair[1]:
                continue
            values, holds, _ = _outcome(definition, keep, pair, seed)
            if values != expected[0]:
                wrong += 1
                assert not holds
    assert wrong > 10


def _outcome(definition: NetDef, keep: list[str], pair: tuple[int, int] | None, seed: int) -> tuple[bytes, bool, int]:
    """The kept blobs after a run in list order with this mistake, whether the proof holds, how many buffers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "place", Misplacing(pair))
        workspace = workspace_for(random.Random(seed))
        with SimpleNet(definition, workspace, keep=frozenset(keep)) as net:
            holds = check_net(net).holds
            net.run()
            values = b"".join(workspace.fetch_blob(name).tobytes() for name in keep)
            return values, holds, len(memory_of(net).buffers)
