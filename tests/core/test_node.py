"""Nodes: what one that is made of another has in common with it."""

from __future__ import annotations

import pytest

from dagexec.core.node import new_node


@pytest.mark.parametrize(
    ("fields", "is_alike"),
    [
        ({"engine": "ONEDNN", "name": "again"}, True),
        ({"arguments": {"scale": 2.0}}, True),
        ({"arguments": {"scale": 3.0}}, False),
        ({"arguments": {"scale": None}}, False),
        ({"op_type": "Relu"}, False),
        ({"inputs": ["a"], "outputs": ["b"]}, True),
        ({"outputs": ["x"]}, False),
    ],
)
def test_a_changed_node_is_of_another_form_if_more_than_names_and_engine_differ(
    fields: dict[str, object], is_alike: bool
) -> None:
    node = new_node("Scale", ["x"], ["y"], scale=2.0)
    assert node.form is new_node("Scale", ["x"], ["y"], scale=2.0).form
    assert (node.changed(**fields).form is node.form) == is_alike  # type: ignore[arg-type]
