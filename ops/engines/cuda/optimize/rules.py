"""Update rules as C++, on one element: a rule's expressions, or for rules of rows what is written here.

In the code `g` is the gradient, `param` the parameter, `s0` and `s1` the state, `e0` and `e1` the extra outputs, and
the numbers of a run have their names, all of type A; `mean` is the mean of the squares of the gradient's row, for rules
of rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field

from dagexec.ops.engines.cuda.base.expressed import Statements
from dagexec.ops.families.optimize.row_wise import RowWiseAdagradRule, RowWiseAdamRule
from dagexec.ops.families.optimize.update import FIRST, GRAD, PARAM, PieceRule, Rule
from dagexec.platform.records import dataclass


@dataclass(frozen=True)
class CudaRule:
    """What a rule does to an element.

    Attributes:
        code: C++ that computes.
        takes: C++ that changes the element.
        numbers: the scalars that the code reads, by name.
        row_states: the numbers of the states that are one number a row; with some, `code` is done once a row.
    """

    code: str
    takes: str
    numbers: Mapping[str, float] = field(default_factory=dict)
    row_states: tuple[int, ...] = ()

    @property
    def by_row(self) -> bool:
        """It reads `mean`."""
        return bool(self.row_states)


def cuda_rule(rule: PieceRule, states: int, has_param: bool) -> CudaRule:
    """A rule with this many numbers of state an element."""
    if isinstance(rule, RowWiseAdamRule):
        moments = [(beta, 1.0 - beta) for beta in rule.betas]
        numbers = dict(zip(("beta1", "rest1", "beta2", "rest2"), sum(moments, ()), strict=True))
        return CudaRule(
            "s1 = beta2 * s1 + rest2 * mean;",
            "s0 = beta1 * s0 + rest1 * g; e0 = s0 * (correction / (sqrt(s1) + epsilon)); "
            "param = kept * param + e0 * rate;",
            {**numbers, "epsilon": rule.epsilon},
            row_states=(1,),
        )
    if isinstance(rule, RowWiseAdagradRule):
        return CudaRule(
            "s0 = s0 + mean;",
            "param = param + g * (rate / (sqrt(s0) + epsilon));",
            {"epsilon": rule.epsilon},
            row_states=(0,),
        )
    assert isinstance(rule, Rule)
    names = {PARAM: "param", GRAD: "g", **dict(enumerate(rule.of_run, FIRST))}
    names.update({len(names) + number: f"s{number}" for number in range(states)})
    statements = Statements(names.__getitem__)
    changed = rule.changed(states)
    results = {f"s{number}": one for number, one in enumerate(changed.state)}
    results |= {f"e{number}": one for number, one in enumerate(changed.extras)}
    results |= {"param": changed.param} if has_param else {}
    takes = " ".join([f"{name} = {statements.of(result)};" for name, result in results.items()])
    return CudaRule(" ".join(statements.lines), takes, statements.scalars)


SETTINGS = ("rate", "kept", "correction", "plain")
"""Adam's numbers of a run, computed from the iteration."""
