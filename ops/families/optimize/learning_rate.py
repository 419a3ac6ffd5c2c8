"""LearningRate: the rate of an optimizer at the iteration that a counter holds."""

from __future__ import annotations

import numpy as np

from dagexec.core.dtypes import FLOAT32
from dagexec.core.gradient import no_gradient
from dagexec.core.operator import Operator, Step
from dagexec.core.registry import new_operator
from dagexec.core.schema import Cost, OperatorCall, TensorType
from dagexec.ops.families.optimize.policies import policy_names, read_policy
from dagexec.ops.families.optimize.scalars import read_iteration, require_iteration


def infer_learning_rate(call: OperatorCall) -> list[TensorType]:
    """One float32 of no axes."""
    require_iteration(call, 0)
    base_lr = call.arguments.float("base_lr", 0.0)
    read_policy(call.arguments, call.label).multiplier(0, base_lr)
    return [TensorType((), FLOAT32)]


@new_operator(
    "LearningRate",
    infer=infer_learning_rate,
    doc="The learning rate at an iteration: base_lr times the multiplier of the policy.",
    input_names=("iteration",),
    output_names=("rate",),
    args={
        "base_lr": "the rate that the policy scales; optimizers that add their step take a negative one",
        "policy": f"one of {', '.join(policy_names())}",
        "gamma": "exp, step, inv, hill: the base of the decay",
        "power": "inv, poly, hill: the exponent",
        "stepsize": "step, cyclical: iterations of a step, of half a cycle",
        "max_iter": "poly: where the rate is 0",
        "num_iter": "warm-ups, hill, gate: how many iterations",
        "start_multiplier": "linearWarmup, hill: where the line begins",
        "end_multiplier": "hill: the minimum multiplier",
        "multiplier": "constantWarmup: the multiplier before num_iter",
        "multiplier_1": "gate, slope: the first multiplier",
        "multiplier_2": "gate, slope: the second multiplier",
        "num_iter_1": "slope: where the line begins",
        "num_iter_2": "slope: where the line ends",
        "active_first": "alter: 1 when the active period is the first (default 1)",
        "active_period": "alter: iterations at the full rate",
        "inactive_period": "alter: iterations at rate 0",
        "m1": "pieceWarmup: the multiplier before n1",
        "n1": "pieceWarmup: an iteration",
        "m2": "pieceWarmup: the multiplier before n2",
        "n2": "pieceWarmup: an iteration",
        "m3": "pieceWarmup: the multiplier from n2 on",
        "max_lr": "cyclical: the highest rate; cosine: the highest multiplier",
        "min_lr": "cosine: the lowest multiplier",
        "decay": "cyclical: factor of the height from cycle to cycle",
        "period": "cosine: iterations of the first cycle",
        "t_mult": "cosine: factor of the period from cycle to cycle",
        "lr_shrink": "cosine: factor of both limits from cycle to cycle",
        "start_warmup_multiplier": "warm-up of constantThenLinearWarmup, compositeCyclical, compositeCosine",
        "constant_warmup_num_iter": "likewise: iterations at that multiplier",
        "linear_warmup_num_iter": "likewise: iterations of the line to 1",
        "cyclical_max_lr": "compositeCyclical: as max_lr",
        "cyclical_step_size": "compositeCyclical: as stepsize",
        "cyclical_decay": "compositeCyclical: as decay",
        "cosine_max_lr": "compositeCosine: as max_lr",
        "cosine_min_lr": "compositeCosine: as min_lr",
        "cosine_period": "compositeCosine: as period",
        "cosine_t_mult": "compositeCosine: as t_mult",
        "cosine_lr_shrink": "compositeCosine: as lr_shrink",
        "sub_policy_num_iters": "composite: iterations of each part; its arguments begin with sub_policy_<k>_, and "
        "sub_policy_<k>_lr_scale multiplies its rate",
        "lr_scale": "as sub_policy_<k>_lr_scale only",
    },
    part_of_arg=r"sub_policy_\d+_",
    required_args=("base_lr", "policy"),
    cost=lambda _call, _outputs: Cost(10, 8, 4),
)
class LearningRate(Operator):
    """A learning rate by policy."""

    def prepare(self) -> Step:
        """Computed in float64, rounded to float32."""
        base_lr = self.arguments.float("base_lr", 0.0)
        multiplier = read_policy(self.arguments, self.label).multiplier
        counter, rate, label = self.x(0).reshape(-1), self.y(0), self.label

        def compute() -> None:
            with np.errstate(over="ignore"):
                rate[...] = base_lr * multiplier(read_iteration(counter, label), base_lr)

        return compute


no_gradient("LearningRate")
