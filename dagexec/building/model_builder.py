"""ModelBuilder: builds a net and the init net of its parameters layer by layer, with the names Caffe2's brew gives.

A layer method adds operators to `net`, creates its parameters in `init_net` and returns the name of its output:

    builder = ModelBuilder("tiny", seed=1)
    x = builder.add_input("data", (1, 3, 8, 8))
    x = builder.conv(x, "conv1", 3, 16, kernel=3, pad=1)
    x = builder.relu(x, x)
    model = builder.model([builder.softmax(builder.fc(x, "pred", 16 * 8 * 8, 10), "softmax")])

A parameter's random seed comes from the builder's seed and the parameter's name, so its values do not depend on which
other parameters there are, or in what order they were made. `dagexec.training.model_helper` trains what is built.
"""

from __future__ import annotations

from collections.abc import Sequence

from dagexec.building.layers.dense import DenseLayers
from dagexec.building.layers.loss import LossLayers
from dagexec.building.layers.normalization import NormalizationLayers
from dagexec.building.layers.recurrent import RecurrentLayers
from dagexec.building.layers.window import Pair, WindowLayers
from dagexec.core.model import Model
from dagexec.core.proto import NetDef
from dagexec.errors import SchemaError

__all__ = ["ModelBuilder", "Pair"]


class ModelBuilder(WindowLayers, DenseLayers, NormalizationLayers, RecurrentLayers, LossLayers):
    """Builds a net from layers in Python. `NetBuilder` documents the attributes."""

    def model(self, outputs: Sequence[str]) -> Model:
        """The model built so far, with these outputs. Later changes to the builder do not reach it.

        Raises SchemaError for an output that no operator writes.
        """
        net, init_net = NetDef(), NetDef()
        net.CopyFrom(self.net)
        init_net.CopyFrom(self.init_net)
        del init_net.op[:]
        init_net.op.extend(filler for filler in self.init_net.op if filler.output[0] not in self.arrays)
        self._check_written(outputs)
        net.external_output.extend(outputs)
        return Model(self.name, net, init_net, dict(self.arrays), dict(self.inputs), outputs=tuple(outputs))

    def _check_written(self, outputs: Sequence[str]) -> None:
        written = {blob for operator in self.net.op for blob in operator.output}
        missing = [blob for blob in outputs if blob not in written]
        if missing:
            raise SchemaError(f"model {self.name!r}: no operator writes {missing}")
