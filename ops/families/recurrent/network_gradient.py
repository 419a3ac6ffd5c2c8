"""The gradient of RecurrentNetwork, whose operators `dagexec.core.recurrent_networks` makes Scans of."""

from __future__ import annotations

from dagexec.core.gradient import GradientOperators, GradientRequest, gradient_of
from dagexec.errors import GradientError


@gradient_of("RecurrentNetwork")
def recurrent_network_gradient(request: GradientRequest) -> GradientOperators:
    """Of the sequence, the parameters that it names, and the initial states, by the backward step net that it has."""
    arguments = request.arguments
    if "backward_step_net" not in arguments:
        raise GradientError(f"{request.label}: it has no backward_step_net")
    definition, with_grads = request.definition, arguments.ints("outputs_with_grads")
    inputs = [*(request.dy(place) for place in with_grads), *definition.input, *definition.output]
    of_inputs = [0, *arguments.ints("param"), *arguments.ints("initial_recurrent_state_ids")]
    return request.single("RecurrentNetworkGradient", inputs, of_inputs)
