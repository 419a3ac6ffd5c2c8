"""YellowFin on CUDA: the tensors in one kernel, two sums, and what is one number by one thread, in double."""

from __future__ import annotations

from functools import partial

import numpy as np

from dagexec.core.operator import Step, in_sequence
from dagexec.ops.engines.cuda.base.broadcast_reduction import reduced
from dagexec.ops.engines.cuda.base.copy import copy_step
from dagexec.ops.engines.cuda.base.expression import computed_scalar, elementwise
from dagexec.ops.engines.cuda.base.faults import CheckedOperator
from dagexec.ops.engines.cuda.base.kinds import on_cuda
from dagexec.ops.engines.cuda.base.operator import Array, c_type_of
from dagexec.ops.families.optimize.yellowfin import YellowFin, first_iteration

_MOVE = r"""
    A velocity = moment_before * (A)factor;
    param = nesterov != A(0) ? param_before + velocity : param_before;
    moment = velocity + g * (A)rate;
    param = param - moment * (nesterov != A(0) ? A(1.0 + (double)factor) : A(1));
    mean = mean_before * beta + g * rest;
    square = square_before * beta + g * g * rest;
"""

_TUNE = r"""
__device__ inline double averaged(T* means, i64 place, double value, double beta) {
    means[place] = (T)(beta * (double)means[place] + (1.0 - beta) * value);
    return (double)means[place];
}
__device__ inline double at_least(double value, double least) { return value < least ? least : value; }
__device__ inline double best_momentum(double low, double high, double variance, double distance) {
    double ratio = sqrt(high / low), limit = (ratio - 1.0) / (ratio + 1.0), curvature = distance * low;
    double p = curvature * curvature / (2.0 * variance);
    double cube = (-sqrt(p * p + 4.0 / 27.0 * p * p * p) - p) / 2.0;
    double w = copysign(pow(fabs(cube), 1.0 / 3.0), cube);
    double root = (w != 0.0 ? w - p / (3.0 * w) : 0.0) + 1.0;
    return at_least(root * root, limit * limit);
}
extern "C" __global__ void tune(const i64* counter, const double* sums, T* window, i64 width, T* scalars, T* rate,
                                T* factor, double beta, double least, int zero_debias, int* fault) {
    if (first_index() != 0) return;
    const i64 iteration = counter[0];
    if (iteration < 1) {
        *fault = 1;
        return;
    }
    const double correction = zero_debias ? 1.0 / (1.0 - pow(beta, (double)iteration)) : 1.0;
    const double squared = at_least(sums[0], least);
    window[((iteration - 1) % width + width) % width] = (T)log(squared);
    double smallest = (double)window[0], greatest = smallest;
    for (i64 k = 1; k < width && k < iteration; ++k) {
        smallest = nan_min(smallest, (double)window[k]);
        greatest = nan_max(greatest, (double)window[k]);
    }
    const double square_mean = averaged(scalars, 1, squared, beta);
    const double norm_mean = averaged(scalars, 0, sqrt(squared), beta);
    const double low = at_least(exp(averaged(scalars, 2, smallest, beta) * correction), least);
    const double high = at_least(exp(averaged(scalars, 3, greatest, beta) * correction), least);
    const double variance = at_least(square_mean * correction - sums[1] * correction * correction, least);
    const double distance = averaged(scalars, 4, norm_mean / square_mean, beta) * correction;
    if (iteration > 1) {
        const double momentum = best_momentum(low, high, variance, distance), rest = 1.0 - sqrt(momentum);
        averaged(factor, 0, momentum, beta);
        averaged(rate, 0, rest * rest / low, beta);
    }
}
"""


@on_cuda(YellowFin)
class CudaYellowFin(CheckedOperator):
    """Self-tuning momentum. An iteration below 1 is found when the tensors are updated."""

    inputs_checked = (9,)

    def prepare(self) -> Step:
        """The update and the statistics of the tensors, two sums, then the statistics that are one number."""
        names = self.definition
        steps: list[Step] = [copy_step(self.y(k), self.x(k)) for k in (2, 3, 4, 7) if names.input[k] != names.output[k]]
        grad = self.x(8).reshape(-1)
        beta = self.arguments.float("beta", 0.999)
        inputs = {"g": grad, "rate": self.y(2).reshape(1), "factor": self.y(3).reshape(1)}
        outputs = {}
        for name, index in (("param", 0), ("moment", 1), ("mean", 5), ("square", 6)):
            inputs[f"{name}_before"], outputs[name] = self.x(index).reshape(-1), self.y(index).reshape(-1)
        numbers = {"beta": beta, "rest": 1.0 - beta, "nesterov": float(self.arguments.bool("nesterov"))}
        scalars = {name: computed_scalar(grad, value) for name, value in numbers.items()}
        steps.append(elementwise(self, "yellowfin", inputs, outputs, _MOVE, scalars))
        sums = self.scratch((2,), np.float64)
        for place, array in enumerate((grad, outputs["mean"])):
            code = "value = (double)(x * x);"
            steps.append(reduced(self, "square", (grad.size,), {"x": array}, sums[place : place + 1], code))
        window = self.y(4)
        arguments = [
            *(self.x(9), sums, window, np.int64(window.size), self.y(7), self.y(2), self.y(3)),
            *(np.float64(beta), np.float64(self.arguments.float("epsilon", 1e-6))),
            np.int32(self.arguments.bool("zero_debias", True)),
            self.fault_word(
                partial(self._check_iteration, self.x(9)), ValueError(f"{self.label}: the iteration must be at least 1")
            ),
        ]
        steps.append(self.launch("tune", _TUNE, arguments, blocks=1, threads=32, T=c_type_of(grad)))
        return in_sequence(steps)

    def _check_iteration(self, counter: Array) -> None:
        first_iteration(self.fetched(counter.reshape(-1)), self.label)
