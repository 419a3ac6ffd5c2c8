"""What dense and sparse updates share: the learning rate and the iteration, and Adam's settings of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np

from dagexec.core.operator import Step, nothing_to_do
from dagexec.ops.engines.cuda.base.constants import uploaded
from dagexec.ops.engines.cuda.base.expression import elementwise
from dagexec.ops.engines.cuda.base.faults import CheckedOperator
from dagexec.ops.engines.cuda.base.operator import Array
from dagexec.ops.engines.cuda.optimize.rules import SETTINGS
from dagexec.ops.families.optimize.scalars import read_iteration
from dagexec.ops.families.optimize.update import Update

_SETTINGS = r"""
    double t = (double)iteration + 1.0, bias1 = 1.0 - pow(beta1, t), bias2 = 1.0 - pow(beta2, t);
    double factor = sqrt(bias2) / bias1;
    bool flat = false;
    if (rectifies) {
        double limit = 2.0 / (1.0 - beta2) - 1.0, length = limit - 2.0 * t * (1.0 - bias2) / bias2;
        flat = length < 5.0;
        factor = flat ? 1.0 / bias1 : factor * sqrt((length - 4.0) * (length - 2.0) * limit
                                                    / ((limit - 4.0) * (limit - 2.0) * length));
    }
    rate = given;
    kept = 1.0 + (double)given * decay;
    correction = factor;
    plain = flat;
    fault = iteration < 0;
"""


class CudaUpdate(CheckedOperator):
    """Base of the update operators, mixed into classes made of the host's."""

    @property
    def inputs_checked(self) -> Sequence[int]:
        """The indices, and the iteration."""
        assert isinstance(self, Update)
        return [index for index in (self.parts.indices, self.parts.iteration) if index is not None]

    def settings(self) -> tuple[Step, Mapping[str, Array]]:
        """The step that computes what is one number a run, and these numbers, in device memory."""
        assert isinstance(self, Update)
        parts = self.parts
        like = self.x(parts.grad)
        if parts.rate is None or parts.rate >= len(self.input_blobs):
            rate = uploaded(self, np.full(1, self.make_rule().default_rate, like.dtype))
        else:
            rate = self.x(parts.rate).reshape(1)
        if parts.iteration is None:
            return nothing_to_do, {"rate": rate}
        memory = self.scratch((len(SETTINGS),), like.dtype)
        found = {name: memory[index : index + 1] for index, name in enumerate(SETTINGS)}
        scalars: dict[str, np.generic] = {
            "beta1": np.float64(self.arguments.float("beta1", 0.9)),
            "beta2": np.float64(self.arguments.float("beta2", 0.999)),
            "decay": np.float64(self.arguments.float("decoupled_weight_decay", 0.0)),
            "rectifies": np.int32(self.arguments.bool("enableRAdam")),
        }
        inputs = {"given": rate, "iteration": self.x(parts.iteration).reshape(1)}
        negative = ValueError(f"{self.label}: the iteration must be at least 0")
        fault = self.fault_word(partial(self._check_iteration, inputs["iteration"]), negative)
        return elementwise(self, "adam_settings", inputs, found | {"fault": fault}, _SETTINGS, scalars), found

    def _check_iteration(self, counter: Array) -> None:
        read_iteration(self.fetched(counter), self.label)
