"""Updates of parameters in one pass over memory, by kernels of our own.

NumPy's rules (`ops/families/optimize`) take five to ten passes over a piece and an interpreter's call for each. The
operations of a kernel are the same, in the same order and rounded alike, so that both give the same bytes.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from dagexec.core.dtypes import FLOAT32
from dagexec.core.operator import Step, in_sequence
from dagexec.core.registry import operator
from dagexec.errors import UnsupportedFeatureError
from dagexec.ops.engines.onednn.descriptors import Array
from dagexec.ops.engines.onednn.operator import OneDNNOperator
from dagexec.ops.families.optimize import adam, momentum
from dagexec.ops.families.optimize.update import DenseUpdate, Rule
from dagexec.ops.kernels.builder import Builder, Vector
from dagexec.ops.kernels.formulas import Formula, formula_step

Read = Callable[[int], Vector]


class FormulaUpdate(OneDNNOperator, DenseUpdate):
    """Base: parameter, state and gradient are read, and written where they lie, by one formula."""

    metas = (FLOAT32,)

    @abstractmethod
    def formula(self, rule: Rule) -> tuple[Formula, Sequence[Array]]:
        """What computes parameter, state and step of those of before and the gradient; and numbers that it reads last.

        The rule sets the numbers at the begin of a run. Parameter and step are left out where there are none.
        """

    def prepare_primitive(self) -> Step:
        """The kernel. The rule begins before it, unless a rate that the kernel can read is all that it needs."""
        parts, rule = self.parts, self.make_rule()
        formula, numbers = self.formula(rule)
        begin = [self.beginning(rule)]
        if parts.iteration is None and parts.rate is not None and self.input(parts.rate).meta is FLOAT32:
            rate, begin = self.x(parts.rate).reshape(()), []
            numbers = [rate if number is rule.rate else number for number in numbers]
        kept = [*(() if parts.param is None else (parts.param,)), *parts.state]
        changed = [self.target(source).reshape(-1) for source in kept]
        extras = [self.y(index).reshape(-1) for index in parts.extras if index < len(self.output_blobs)]
        inputs = [*changed, self.x(parts.grad).reshape(-1), *numbers]
        apply = formula_step(self.onednn.machine, formula, inputs, [*changed, *extras], self.label)
        if apply is None:
            raise UnsupportedFeatureError(f"{self.label}: there is no kernel for such arrays")
        copies = [partial(np.copyto, target, source) for target, source in self.moved()]
        return in_sequence([*begin, *copies, apply])


def _nesterov(build: Builder, read: Read) -> list[Vector]:
    """Of momentum, gradient, rate, factor of the momentum and 1 + that: the new momentum and the step."""
    kept = read(0) * read(3)
    value = read(1) * read(2) + kept
    return [value, value * read(4) - kept]


def _momentum(build: Builder, read: Read) -> list[Vector]:
    """As `_nesterov`, without looking ahead."""
    value = read(1) * read(2) + read(0) * read(3)
    return [value, value]


def _nesterov_update(build: Builder, read: Read) -> list[Vector]:
    """Of parameter, momentum and so on: the new parameter, the new momentum and the step."""
    value, step = _nesterov(build, lambda number: read(number + 1))
    return [read(0) - step, value, step]


def _momentum_update(build: Builder, read: Read) -> list[Vector]:
    value, step = _momentum(build, lambda number: read(number + 1))
    return [read(0) - step, value, step]


class _Momentum(FormulaUpdate):
    def formula(self, rule: Rule) -> tuple[Formula, Sequence[Array]]:
        assert isinstance(rule, momentum.MomentumRule)
        if self.parts.param is None:
            formula = _nesterov if rule.nesterov else _momentum
        else:
            formula = _nesterov_update if rule.nesterov else _momentum_update
        return formula, rule.numbers


def _adam(build: Builder, read: Read) -> list[Vector]:
    """Of parameter, moments, gradient and `AdamRule.numbers`: all but the gradient changed, and the step."""
    gradient = read(3)
    first = read(1) * read(4) + gradient * read(5)
    second = read(2) * read(6) + gradient * gradient * read(7)
    step = first / (build.square_root(second) + read(8)) * read(9)
    return [read(0) * read(11) + step * read(10), first, second, step]


@operator(adam.Adam.schema, engine="ONEDNN")
class Adam(FormulaUpdate, adam.Adam):
    """Adam on a dense gradient."""

    def formula(self, rule: Rule) -> tuple[Formula, Sequence[Array]]:
        assert isinstance(rule, adam.AdamRule)
        return _adam, rule.numbers


@operator(momentum.MomentumSGD.schema, engine="ONEDNN")
class MomentumSGD(_Momentum, momentum.MomentumSGD):
    """The step of gradient descent with momentum."""


@operator(momentum.MomentumSGDUpdate.schema, engine="ONEDNN")
class MomentumSGDUpdate(_Momentum, momentum.MomentumSGDUpdate):
    """The step of gradient descent with momentum, taken."""
