"""Updates by dense gradients on CUDA: one kernel."""

from __future__ import annotations

from collections.abc import Callable

from dagexec.core.operator import Step, in_sequence
from dagexec.ops.engines.cuda.base.expression import computed_scalar, elementwise
from dagexec.ops.engines.cuda.base.kinds import on_cuda
from dagexec.ops.engines.cuda.base.operator import Array
from dagexec.ops.engines.cuda.optimize.rules import cuda_rule
from dagexec.ops.engines.cuda.optimize.update import CudaUpdate
from dagexec.ops.families.optimize.adam import Adam
from dagexec.ops.families.optimize.adaptive import Adadelta, Adagrad, RmsProp
from dagexec.ops.families.optimize.ftrl import Ftrl
from dagexec.ops.families.optimize.momentum import MomentumSGD, MomentumSGDUpdate
from dagexec.ops.families.optimize.update import DenseUpdate


class CudaDenseUpdate(CudaUpdate):
    """Base of the updates by a gradient of the parameter's shape, mixed into classes made of the host's."""

    def prepare(self) -> Step:
        """What is one number a run, then the rule."""
        assert isinstance(self, DenseUpdate)
        parts = self.parts
        begin, settings = self.settings()
        inputs: dict[str, Array] = {"g": self.x(parts.grad).reshape(-1)}
        outputs: dict[str, Array] = {}
        state = list(zip(self._states(self.x), self._states(self.target), strict=True))
        for number, (before, after) in enumerate(state):
            inputs[f"s{number}_before"], outputs[f"s{number}"] = before, after
        if parts.param is not None:
            inputs["param_before"] = self.x(parts.param).reshape(-1)
            outputs["param"] = self.target(parts.param).reshape(-1)
        begun = "".join(f"{key} = {key}_before; " for key in outputs)
        missing = ""
        for number, index in enumerate((*parts.extras, None, None)[:2]):
            if index is not None and index < len(self.output_blobs):
                outputs[f"e{number}"] = self.y(index).reshape(-1)
            else:
                missing += f"A e{number}; "
        rule = cuda_rule(self.make_rule(), len(state), parts.param is not None)
        code, name = f"{missing}{begun}{rule.code} {rule.takes}", type(self).schema.type.lower()
        numbers = {key: computed_scalar(inputs["g"], value) for key, value in rule.numbers.items()}
        return in_sequence([begin, elementwise(self, name, {**inputs, **settings}, outputs, code, numbers)])

    def _states(self, of: Callable[[int], Array]) -> list[Array]:
        """The state, as arrays of one axis: FTRL's pairs are two."""
        assert isinstance(self, DenseUpdate)
        grad = self.x(self.parts.grad)
        found: list[Array] = []
        for source in self.parts.state:
            array = of(source)
            pairs = array.reshape(grad.size, 2) if array.ndim > grad.ndim else None
            found += [array.reshape(-1)] if pairs is None else [pairs[:, 0], pairs[:, 1]]
        return found


for _kind in (MomentumSGD, MomentumSGDUpdate, Adagrad, Adadelta, RmsProp, Ftrl, Adam):
    on_cuda(_kind)(type(CudaDenseUpdate.__name__, (CudaDenseUpdate,), {"__module__": __name__}))
