"""Gradient descent on parameters of float16."""

from __future__ import annotations

from dagexec.core.arguments import ArgumentValue
from dagexec.core.dtypes import FLOAT16
from dagexec.platform.records import dataclass
from dagexec.training.optimizer import SGD
from dagexec.training.update_net import UpdatedParameter, UpdateNet


@dataclass(frozen=True)
class Fp16SGD(SGD):
    """SGD of parameters of float16, computed in float32, with a momentum of float16; `decay` is for all parameters."""

    takes_sparse = False

    decay: float = 0.0

    def _add_update(self, net: UpdateNet, one: UpdatedParameter) -> None:
        blobs = [one.values, net.state(one, "momentum"), one.name]
        is_half = one.kind.meta is FLOAT16
        wide = [f"{blob}_wide" for blob in blobs] if is_half else blobs
        if is_half:
            for blob, copy in zip(blobs, wide, strict=True):
                net.add(one, "HalfToFloat", [blob], [copy], {})
        grad, momentum, param = wide
        if self.decay:
            ones, decay = net.number(1.0, "ONE", one.device), net.number(self.decay, "fp16_sgd_wd", one.device)
            net.add(one, "WeightedSum", [grad, ones, param, decay], [grad], {})
        arguments: dict[str, ArgumentValue] = {"momentum": float(self.momentum), "nesterov": int(self.nesterov)}
        inputs = [grad, momentum, self._rate(net, one, 1), param]
        net.add(one, "MomentumSGDUpdate", inputs, [grad, momentum, param], arguments)
        if is_half:
            for blob, copy in list(zip(blobs, wide, strict=True))[1:]:
                net.add(one, "FloatToHalf", [copy], [blob], {})
