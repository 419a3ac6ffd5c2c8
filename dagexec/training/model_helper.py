"""ModelHelper: a model builder whose net is trained.

It adds the gradients of what was built, makes the net of a step, and takes the model for inference out of it again.
How a model is trained is told in `docs/training.md`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from dagexec.building.model_builder import ModelBuilder, Pair
from dagexec.building.net_builder import ITERATION
from dagexec.core.arguments import make_argument
from dagexec.core.gradient import Gradient
from dagexec.core.model import InputInfo, Model
from dagexec.core.proto import NetDef
from dagexec.core.workspace import FORM, Net, Workspace
from dagexec.errors import GradientError
from dagexec.platform.processor import available_cores
from dagexec.training import backward, engines, parameter_gradients, prediction

__all__ = ["ModelHelper", "Pair"]


class ModelHelper(ModelBuilder):
    """Builds a net from layers in Python, with gradients and updates:

    helper = ModelHelper("digits", training=True)
    x = helper.conv(helper.add_input("data", (64, 1, 8, 8)), "conv1", 1, 16, kernel=3, pad=1)
    label = helper.add_input("label", (64,), INT32)
    softmax, loss = helper.softmax_with_loss(helper.fc(helper.relu(x, "relu1"), "pred", 16 * 8 * 8, 10), label)
    helper.add_gradient_operators([loss])
    """

    _gradients: dict[str, Gradient] | None = None
    _forward_operators: int | None = None

    @property
    def params_to_grad(self) -> dict[str, Gradient]:
        """The gradient of each trained parameter. Raises GradientError before `add_gradient_operators`."""
        if self._gradients is None:
            raise GradientError(f"model {self.name!r}: there are no gradients yet: call add_gradient_operators")
        return dict(self._gradients)

    def add_gradient_operators(
        self, losses: Mapping[str, str | None] | Sequence[str], *, without: Collection[str] = ()
    ) -> dict[str, Gradient]:
        """Append the gradient operators of `losses` for all trained parameters, and return `params_to_grad`.

        Call it once. Each parameter gets its own gradient, which updates may overwrite. Parameters in `without` need no
        gradient. Raises GradientError like `dagexec.training.backward.add_gradient_operators`, and for any other
        parameter without a gradient.
        """
        if self._gradients is not None:
            raise GradientError(f"model {self.name!r}: there are gradients already")
        length = len(self.net.op)
        trial = NetDef()
        trial.CopyFrom(self.net)
        found = backward.add_gradient_operators(trial, losses, wanted=self.parameters)
        missing = [name for name in self.parameters if name not in found and name not in without]
        if missing:
            raise GradientError(
                f"model {self.name!r}: no gradient of {sorted(losses)} reaches the parameters {missing}; "
                f"name those that should not be trained in `without`"
            )
        gradients = {name: found[name] for name in self.parameters if name in found}
        devices = parameter_gradients.devices_of(self.init_net)
        self._gradients = parameter_gradients.with_own_blobs(trial, gradients, length, devices)
        trial.arg.append(make_argument(FORM, engines.TRAINING))
        self.net.CopyFrom(trial)
        self._forward_operators = length
        return self.params_to_grad

    def checkpoint_blobs(self) -> list[str]:
        """What a training needs to go on: parameters, computed ones, the state of updates, and the step counter."""
        states = [name for name in self.states if name != ITERATION]
        counter = [ITERATION] if ITERATION in self.states else []
        return [*self.parameters, *self.computed_parameters, *states, *counter]

    def create(self, workspace: Workspace) -> None:
        """Run the init net in `workspace`, and feed `arrays`: every parameter and all state start again."""
        workspace.run_net_once(self.init_net)
        for name, array in self.arrays.items():
            workspace.feed_blob(name, array)

    def create_net(self, workspace: Workspace, net_type: str = "dag", num_workers: int | None = None) -> Net:
        """Make the net of a step in `workspace`, in the form that is fastest here (`training_form`).

        `num_workers` defaults to the cores, of which `simple` uses one. Raises what `Workspace.create_net` raises.
        """
        return workspace.create_net(
            engines.training_form(self.net, workspace), net_type, num_workers or available_cores()
        )

    def predict_model(
        self,
        workspace: Workspace,
        outputs: Sequence[str],
        *,
        shapes: Mapping[str, Sequence[int | None]] | None = None,
    ) -> Model:
        """The model for inference that computes `outputs` from the values parameters have in `workspace`.

        Layers are in test mode, and what the outputs do not need, such as labels and losses, is not there. `shapes`
        replaces those that inputs were declared with. The parameters are copies.
        Raises SchemaError for an output that no operator writes, and MissingBlobError for an empty workspace.
        """
        self._check_written(outputs)
        net = prediction.prediction_net(self.net, self._forward_operators, outputs)
        known = {**self.parameters, **self.computed_parameters, **self.states}
        parameters = {name: workspace.fetch_blob(name) for name in net.external_input if name in known}
        for array in parameters.values():
            array.flags.writeable = False
        replaced = shapes or {}
        inputs = {
            name: InputInfo(info.dtype, tuple(replaced.get(name, info.shape or ())))
            for name, info in self.inputs.items()
            if name in net.external_input
        }
        return Model(self.name, net, parameters=parameters, inputs=inputs, outputs=tuple(outputs))
