"""Learning-rate policies: how the rate of an optimizer depends on the iteration.

The rate is `base_lr * policy.multiplier(iteration, base_lr)`. Formulas and defaults are Caffe2's
(caffe2/sgd/learning_rate_*).
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import field

from dagexec.core.arguments import Arguments, ArgumentValue
from dagexec.errors import ArgumentError
from dagexec.ops.families.optimize.policy import Policy, policy, policy_names, read_policy
from dagexec.platform.records import dataclass

__all__ = [
    "Alter",
    "Composite",
    "CompositeCosine",
    "CompositeCyclical",
    "ConstantThenLinearWarmup",
    "ConstantWarmup",
    "Cosine",
    "Cyclical",
    "Exp",
    "Fixed",
    "Gate",
    "Hill",
    "Inv",
    "LinearWarmup",
    "PieceWarmup",
    "Policy",
    "Poly",
    "Slope",
    "Stage",
    "Step",
    "policy_names",
    "read_policy",
]


def _power(base: float, exponent: float) -> float:
    """base ** exponent, infinite where that is too large for a float."""
    try:
        return math.pow(base, exponent)
    except OverflowError:
        return math.inf


@policy("fixed")
class Fixed(Policy):
    """1."""

    def multiplier(self, iteration: int, base_lr: float) -> float:
        return 1.0


@policy("alter")
class Alter(Policy):
    """1 for `active_period` iterations, 0 for `inactive_period`, and so on; with `active_first=False` 0 first."""

    active_period: int
    inactive_period: int
    active_first: bool = True

    def __post_init__(self) -> None:
        periods = (self.active_period, self.inactive_period)
        self.require(min(periods) >= 0 and sum(periods) > 0, "the periods must be at least 0, and one more than that")

    def multiplier(self, iteration: int, base_lr: float) -> float:
        first = self.active_period if self.active_first else self.inactive_period
        in_first = iteration % (self.active_period + self.inactive_period) < first
        return float(in_first == self.active_first)


@policy("step")
class Step(Policy):
    """gamma ^ floor(iteration / stepsize)."""

    stepsize: int
    gamma: float

    def __post_init__(self) -> None:
        self.require(self.stepsize > 0 and self.gamma > 0, "stepsize and gamma must be above 0")

    def multiplier(self, iteration: int, base_lr: float) -> float:
        return _power(self.gamma, iteration // self.stepsize)


@policy("exp")
class Exp(Policy):
    """gamma ^ iteration."""

    gamma: float

    def __post_init__(self) -> None:
        self.require(self.gamma > 0, "gamma must be above 0")

    def multiplier(self, iteration: int, base_lr: float) -> float:
        return _power(self.gamma, iteration)


@policy("gate")
class Gate(Policy):
    """multiplier_1 before iteration `num_iter`, multiplier_2 from there on."""

    multiplier_1: float = 1.0
    multiplier_2: float = 1.0
    num_iter: int = 0

    def multiplier(self, iteration: int, base_lr: float) -> float:
        return self.multiplier_1 if iteration < self.num_iter else self.multiplier_2


@policy("inv")
class Inv(Policy):
    """(1 + gamma * iteration) ^ -power."""

    gamma: float
    power: float

    def __post_init__(self) -> None:
        self.require(self.gamma > 0 and self.power > 0, "gamma and power must be above 0")

    def multiplier(self, iteration: int, base_lr: float) -> float:
        return _power(1.0 + self.gamma * iteration, -self.power)


@policy("poly")
class Poly(Policy):
    """(1 - iteration / max_iter) ^ power; 0 from max_iter on, where Caffe2's formula has no meaning."""

    power: float
    max_iter: int

    def __post_init__(self) -> None:
        self.require(self.power > 0 and self.max_iter > 0, "power and max_iter must be above 0")

    def multiplier(self, iteration: int, base_lr: float) -> float:
        return _power(max(0.0, 1.0 - iteration / self.max_iter), self.power)


@policy("linearWarmup")
class LinearWarmup(Policy):
    """From start_multiplier to 1 in a straight line over `num_iter` iterations, then 1."""

    start_multiplier: float = 0.0
    num_iter: int = 0

    def __post_init__(self) -> None:
        self.require(self.start_multiplier >= 0, "start_multiplier must be at least 0")

    def multiplier(self, iteration: int, base_lr: float) -> float:
        if iteration >= self.num_iter:
            return 1.0
        return self.start_multiplier + (1.0 - self.start_multiplier) * iteration / self.num_iter


@policy("constantWarmup")
class ConstantWarmup(Policy):
    """`factor` (argument `multiplier`) before iteration `num_iter`, then 1."""

    factor: float = 0.5
    num_iter: int = 0

    def __post_init__(self) -> None:
        self.require(self.factor > 0, "the multiplier must be above 0")

    def arguments(self, prefix: str = "") -> dict[str, ArgumentValue]:
        """As of every policy, but that `factor` is argument `multiplier`."""
        return {f"{prefix}policy": self.name, f"{prefix}multiplier": self.factor, f"{prefix}num_iter": self.num_iter}

    @classmethod
    def read(cls, arguments: Arguments, label: str, prefix: str) -> Policy:
        """The policy that the arguments say."""
        return cls(arguments.float(f"{prefix}multiplier", 0.5), arguments.int(f"{prefix}num_iter", 0))

    def multiplier(self, iteration: int, base_lr: float) -> float:
        return self.factor if iteration < self.num_iter else 1.0


@policy("pieceWarmup")
class PieceWarmup(Policy):
    """m1 before iteration n1, m2 before n2, then m3."""

    m1: float = 0.5
    n1: int = 0
    m2: float = 0.5
    n2: int = 0
    m3: float = 0.5

    def multiplier(self, iteration: int, base_lr: float) -> float:
        return self.m1 if iteration < self.n1 else self.m2 if iteration < self.n2 else self.m3


@policy("hill")
class Hill(Policy):
    """LinearWarmup for `num_iter` iterations, then Inv counted from there, but never below end_multiplier."""

    num_iter: int
    gamma: float
    power: float
    start_multiplier: float = 0.0
    end_multiplier: float = 0.0

    def __post_init__(self) -> None:
        self.require(min(self.num_iter, self.gamma, self.power) > 0, "num_iter, gamma and power must be above 0")
        ends = (self.start_multiplier, self.end_multiplier)
        self.require(all(0 <= end <= 1 for end in ends), "start_multiplier and end_multiplier must be in [0, 1]")

    def multiplier(self, iteration: int, base_lr: float) -> float:
        if iteration < self.num_iter:
            return LinearWarmup(self.start_multiplier, self.num_iter).multiplier(iteration, base_lr)
        falling = Inv(self.gamma, self.power).multiplier(iteration - self.num_iter, base_lr)
        return max(self.end_multiplier, falling)


@policy("slope")
class Slope(Policy):
    """multiplier_1 before iteration num_iter_1, then a straight line that reaches multiplier_2 at num_iter_2.

    The line is not let below multiplier_2: made for a rate that falls. One that rises is multiplier_2 at once and goes
    on along the line after num_iter_2, as in Caffe2.
    """

    num_iter_1: int
    num_iter_2: int
    multiplier_1: float = 0.0
    multiplier_2: float = 0.0

    def __post_init__(self) -> None:
        self.require(0 < self.num_iter_1 < self.num_iter_2, "expected 0 < num_iter_1 < num_iter_2")

    def multiplier(self, iteration: int, base_lr: float) -> float:
        if iteration < self.num_iter_1:
            return self.multiplier_1
        rise = (self.multiplier_2 - self.multiplier_1) / (self.num_iter_2 - self.num_iter_1)
        return max(self.multiplier_2, self.multiplier_1 + (iteration - self.num_iter_1) * rise)


@policy("cyclical")
class Cyclical(Policy):
    """A triangle of period 2 * stepsize between base_lr and max_lr, its height times `decay` after each period.

    1 + (|max_lr| / |base_lr| - 1) * max(0, 1 - x) * decay ^ cycle, with cycle = floor(iteration / (2 * stepsize)) and
    x = |iteration / stepsize - 2 * cycle - 1|. Smith, 2017, arXiv:1506.01186.
    """

    stepsize: int
    max_lr: float = 0.005
    decay: float = 1.0

    def __post_init__(self) -> None:
        self.require(self.stepsize > 0, "stepsize must be above 0")

    def multiplier(self, iteration: int, base_lr: float) -> float:
        """The formula of the class. Raises ArgumentError for a base rate of 0."""
        self.require(base_lr != 0, "base_lr must not be 0")
        cycle = iteration // (2 * self.stepsize)
        x = abs(iteration / self.stepsize - 2 * cycle - 1)
        height = abs(self.max_lr) / abs(base_lr) - 1.0
        return 1.0 + height * max(0.0, 1.0 - x) * _power(self.decay, cycle)


@policy("cosine")
class Cosine(Policy):
    """Half a cosine from max_lr down to min_lr, which are multipliers of base_lr, again and again.

    Cycle i has period * t_mult ^ i iterations, and both limits are multiplied by lr_shrink ^ i:
    lr_shrink ^ i * (min_lr + (max_lr - min_lr) * (1 + cos(pi * place / length)) / 2). Loshchilov and Hutter, 2017,
    arXiv:1608.03983.
    """

    max_lr: float = 0.5
    min_lr: float = 0.1
    period: int = 50
    t_mult: float = 1.0
    lr_shrink: float = 0.99

    def __post_init__(self) -> None:
        self.require(self.max_lr >= self.min_lr, "max_lr must be at least min_lr")
        self.require(self.period > 0, "period must be above 0")
        self.require(self.t_mult >= 1, "t_mult must be at least 1")

    def multiplier(self, iteration: int, base_lr: float) -> float:
        cycle = self._cycle(iteration)
        length = self.period * _power(self.t_mult, cycle)
        place = iteration - self._start(cycle)
        shrink = _power(self.lr_shrink, cycle)
        wave = 0.5 * (self.max_lr - self.min_lr) * (1.0 + math.cos(math.pi * place / length))
        return shrink * (self.min_lr + wave)

    def _start(self, cycle: int) -> float:
        """The iteration at which a cycle begins."""
        if self.t_mult == 1:
            return self.period * cycle
        return self.period * (_power(self.t_mult, cycle) - 1.0) / (self.t_mult - 1.0)

    def _cycle(self, iteration: int) -> int:
        """The cycle that an iteration is in; the logarithm may be off by one where a cycle begins."""
        if self.t_mult == 1:
            return iteration // self.period
        ratio = 1.0 + iteration / self.period * (self.t_mult - 1.0)
        cycle = math.floor(math.log(ratio) / math.log(self.t_mult))
        if self._start(cycle) > iteration:
            return cycle - 1
        return cycle + 1 if self._start(cycle + 1) <= iteration else cycle


@policy("constantThenLinearWarmup")
class ConstantThenLinearWarmup(Policy):
    """start_warmup_multiplier for constant_warmup_num_iter iterations, then a line to 1 over linear_warmup_num_iter."""

    start_warmup_multiplier: float = 0.1
    constant_warmup_num_iter: int = 10_000_000
    linear_warmup_num_iter: int = 10_000_000

    def __post_init__(self) -> None:
        self.require(self.start_warmup_multiplier >= 0, "start_warmup_multiplier must be at least 0")

    def multiplier(self, iteration: int, base_lr: float) -> float:
        if iteration < self.constant_warmup_num_iter:
            return self.start_warmup_multiplier
        line = LinearWarmup(self.start_warmup_multiplier, self.linear_warmup_num_iter)
        return line.multiplier(iteration - self.constant_warmup_num_iter, base_lr)


@dataclass(frozen=True)
class _AfterWarmup(Policy):
    """ConstantThenLinearWarmup, then another policy counted from the end of the warm-up."""

    start_warmup_multiplier: float = 0.1
    constant_warmup_num_iter: int = 10_000_000
    linear_warmup_num_iter: int = 10_000_000

    def __post_init__(self) -> None:
        self._warmup()
        self.after()

    @abstractmethod
    def after(self) -> Policy:
        """The policy after the warm-up."""

    def _warmup(self) -> Policy:
        return ConstantThenLinearWarmup(
            self.start_warmup_multiplier, self.constant_warmup_num_iter, self.linear_warmup_num_iter
        )

    def multiplier(self, iteration: int, base_lr: float) -> float:
        """That of the warm-up, or of the policy after it."""
        warm = self.constant_warmup_num_iter + self.linear_warmup_num_iter
        if iteration < warm:
            return self._warmup().multiplier(iteration, base_lr)
        return self.after().multiplier(iteration - warm, base_lr)


@policy("compositeCyclical")
class CompositeCyclical(_AfterWarmup):
    """ConstantThenLinearWarmup, then Cyclical."""

    cyclical_max_lr: float = 0.05
    cyclical_step_size: int = 1_000_000
    cyclical_decay: float = 1.0

    def after(self) -> Policy:
        return Cyclical(self.cyclical_step_size, self.cyclical_max_lr, self.cyclical_decay)


@policy("compositeCosine")
class CompositeCosine(_AfterWarmup):
    """ConstantThenLinearWarmup, then Cosine."""

    cosine_max_lr: float = 0.5
    cosine_min_lr: float = 0.1
    cosine_period: int = 50
    cosine_t_mult: float = 1.0
    cosine_lr_shrink: float = 0.99

    def after(self) -> Policy:
        return Cosine(
            self.cosine_max_lr, self.cosine_min_lr, self.cosine_period, self.cosine_t_mult, self.cosine_lr_shrink
        )


@dataclass(frozen=True)
class Stage:
    """A part of a Composite policy: `policy` for `num_iter` iterations, its multiplier times `lr_scale`."""

    num_iter: int
    policy: Policy
    lr_scale: float = 1.0


@policy("composite")
class Composite(Policy):
    """One policy after the other; each sees the iteration counted from the start of training.

    As in Caffe2 the first stage ends after iteration num_iter, as counters begin at 1; iteration 0 belongs to it, and
    the last stage does not end.
    """

    stages: tuple[Stage, ...] = field(default=())

    def __post_init__(self) -> None:
        self.require(len(self.stages) > 0, "expected at least one stage")
        self.require(all(stage.num_iter > 0 for stage in self.stages), "every num_iter must be above 0")
        self.require(
            not any(isinstance(stage.policy, Composite) for stage in self.stages), "a stage must not be composite"
        )

    def arguments(self, prefix: str = "") -> dict[str, ArgumentValue]:
        """`sub_policy_num_iters`, and `sub_policy_<k>_` before the arguments of stage k."""
        counts = [stage.num_iter for stage in self.stages]
        made: dict[str, ArgumentValue] = {f"{prefix}policy": self.name, f"{prefix}sub_policy_num_iters": counts}
        for index, stage in enumerate(self.stages):
            start = f"{prefix}sub_policy_{index}_"
            made |= {**stage.policy.arguments(start), f"{start}lr_scale": float(stage.lr_scale)}
        return made

    @classmethod
    def read(cls, arguments: Arguments, label: str, prefix: str) -> Policy:
        stages = []
        for index, count in enumerate(arguments.ints(f"{prefix}sub_policy_num_iters")):
            start = f"{prefix}sub_policy_{index}_"
            if arguments.string(f"{start}policy", "") == cls.name:
                raise ArgumentError(f"{label}: '{start}policy' must not be composite")
            part = read_policy(arguments, label, start)
            stages.append(Stage(count, part, arguments.float(f"{start}lr_scale", 1.0)))
        return cls(tuple(stages))

    def multiplier(self, iteration: int, base_lr: float) -> float:
        """That of the stage the iteration is in."""
        end = 0
        for stage in self.stages:
            end += stage.num_iter
            if iteration <= end:
                break
        return stage.lr_scale * stage.policy.multiplier(iteration, base_lr)
