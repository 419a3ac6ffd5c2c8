"""Operators by module: every operator is in one group, and no group is too large to draw."""

import pytest

from dagexec.core.drawing.modules import MOST_NODES, Group, module_tree


def groups_in(group: Group) -> list[Group]:
    inside = [member for member in group.members if isinstance(member, Group)]
    return [group, *(found for one in inside for found in groups_in(one))]


def test_a_small_net_is_one_drawing() -> None:
    assert module_tree(["conv", "relu"]).members == (0, 1)


def test_names_of_modules_become_groups() -> None:
    names = [
        f"/model/layer.{layer}/{part}/op{n}" for layer in range(12) for part in ("mlp", "attention") for n in range(20)
    ]
    members = [member for member in module_tree(names).members if isinstance(member, Group)]
    assert [member.name for member in members] == [f"layer.{n}" for n in range(12)]
    assert members[0].members == tuple(range(40))


@pytest.mark.parametrize(
    "names",
    [
        [""] * 1000,
        ["same"] * 1000,
        [f"blob_{n}" for n in range(10_000)],
        [f"/block/part{n % 7}/inner.{n % 300}/op" for n in range(10_000)],
        ["/".join(["deep"] * 50) + f"/{n}" for n in range(500)],
        pytest.param([f"m{n}/a" for n in range(50_000)], marks=pytest.mark.slow),
        ["/", "//", "a/", "/a", "a//b"] * 100,
    ],
)
def test_no_drawing_has_too_many_nodes_and_none_is_lost(names: list[str]) -> None:
    tree = module_tree(names)
    assert sorted(tree.operators()) == list(range(len(names)))
    assert max(len(group.members) for group in groups_in(tree)) <= MOST_NODES
