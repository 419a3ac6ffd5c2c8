"""The update rules for one number, written from the papers and from the reference of Caffe2's operators."""

from __future__ import annotations

import math

from tests.ops.optimize.updating import Formula

Result = tuple[float, list[float], list[float]]


def momentum(factor: float, nesterov: bool) -> Formula:
    """Gradient descent with momentum; the rate is positive and the extra output is the step."""

    def formula(param: float, state: list[float], grad: float, rate: float, _iteration: int) -> Result:
        velocity = rate * grad + factor * state[0]
        step = velocity + factor * (velocity - state[0]) if nesterov else velocity
        return param - step, [velocity], [step]

    return formula


def adagrad(epsilon: float, decay: float = 1.0) -> Formula:
    """Adagrad; the extra outputs are the effective rate and the step."""

    def formula(param: float, state: list[float], grad: float, rate: float, _iteration: int) -> Result:
        total = decay * state[0] + grad**2
        effective = rate / (total**0.5 + epsilon)
        return param + effective * grad, [total], [effective, effective * grad]

    return formula


def adam(beta1: float, beta2: float, epsilon: float, decay: float = 0.0) -> Formula:
    """Adam, the iteration counted from 0; the extra output is the step without rate. `decay` is that of AdamW."""

    def formula(param: float, state: list[float], grad: float, rate: float, iteration: int) -> Result:
        first = beta1 * state[0] + (1 - beta1) * grad
        second = beta2 * state[1] + (1 - beta2) * grad**2
        time = iteration + 1
        step = first / (1 - beta1**time) / (math.sqrt(second) + epsilon) * math.sqrt(1 - beta2**time)
        return param + rate * step + rate * decay * param, [first, second], [step]

    return formula


def rectified_adam(beta1: float, beta2: float, epsilon: float) -> Formula:
    """Algorithm 2 of arXiv:1908.03265 with the limit 5."""

    def formula(param: float, state: list[float], grad: float, rate: float, iteration: int) -> Result:
        first = beta1 * state[0] + (1 - beta1) * grad
        second = beta2 * state[1] + (1 - beta2) * grad**2
        time = iteration + 1
        unbiased = first / (1 - beta1**time)
        longest = 2 / (1 - beta2) - 1
        length = longest - 2 * time * beta2**time / (1 - beta2**time)
        step = unbiased
        if length >= 5:
            rectified = ((length - 4) / (longest - 4)) * ((length - 2) / (longest - 2)) * (longest / length)
            step = math.sqrt(rectified) * unbiased * math.sqrt(1 - beta2**time) / (math.sqrt(second) + epsilon)
        return param + rate * step, [first, second], [step]

    return formula


def rms_prop(decay: float, factor: float, epsilon: float) -> Formula:
    """RMSProp; the rate is that of the operator, the extra output is the step, the parameter stays."""

    def formula(param: float, state: list[float], grad: float, rate: float, _iteration: int) -> Result:
        mean = decay * state[0] + (1 - decay) * grad**2
        velocity = factor * state[1] + rate * grad / math.sqrt(mean + epsilon)
        return param, [mean, velocity], [velocity]

    return formula


def adadelta(decay: float, epsilon: float) -> Formula:
    """Adadelta."""

    def formula(param: float, state: list[float], grad: float, rate: float, _iteration: int) -> Result:
        mean = decay * state[0] + (1 - decay) * grad**2
        step = grad * math.sqrt((state[1] + epsilon) / (mean + epsilon))
        return param + rate * step, [mean, decay * state[1] + (1 - decay) * step**2], []

    return formula


def ftrl(alpha: float | None, beta: float, lambda1: float, lambda2: float) -> Formula:
    """FTRL-Proximal; without alpha it is the rate. The state is the pair (n, z)."""

    def formula(param: float, state: list[float], grad: float, rate: float, _iteration: int) -> Result:
        size = alpha or rate
        squares, linear = state
        grown = squares + grad**2
        linear += grad - (grown**0.5 - squares**0.5) / size * param
        if abs(linear) <= lambda1:
            return 0.0, [grown, linear], []
        excess = linear - math.copysign(lambda1, linear)
        return -excess / ((beta + grown**0.5) / size + lambda2), [grown, linear], []

    return formula
