"""Losses and metrics."""

from __future__ import annotations

from dagexec.building.net_builder import NetBuilder
from dagexec.building.scopes import layer
from dagexec.core.arguments import ArgumentValue


class LossLayers(NetBuilder):
    """Losses and metrics."""

    @layer
    def softmax_with_loss(
        self,
        logits: str,
        label: str,
        softmax_out: str = "softmax",
        loss_out: str = "loss",
        *,
        weight: str | None = None,
        scale: float = 1.0,
        label_prob: bool = False,
    ) -> tuple[str, str]:
        """Softmax over classes and its mean cross entropy with `label`: integers, or with `label_prob` distributions.

        `weight` is a blob with a weight for each row. Returns the names of the softmax and of the loss.
        """
        inputs = [logits, label] if weight is None else [logits, label, weight]
        arguments: dict[str, ArgumentValue] = {}
        if scale != 1:
            arguments["scale"] = float(scale)
        if label_prob:
            arguments["label_prob"] = 1
        softmax = self.add_operator("SoftmaxWithLoss", inputs, [softmax_out, loss_out], **arguments)
        return softmax, self.net.op[-1].output[1]

    @layer
    def label_cross_entropy(self, blob_in: str, label: str, blob_out: str) -> str:
        """-ln of the probability that each row of `blob_in` gives to its label."""
        return self.add_operator("LabelCrossEntropy", [blob_in, label], [blob_out])

    @layer
    def sigmoid_cross_entropy_with_logits(self, logits: str, targets: str, blob_out: str) -> str:
        """For each row the mean cross entropy of the logistic function of its logits with `targets` in [0, 1]."""
        return self.add_operator("SigmoidCrossEntropyWithLogits", [logits, targets], [blob_out])

    @layer
    def squared_l2_distance(self, left: str, right: str, blob_out: str) -> str:
        """Half the squared distance of each row of `left` from that of `right`."""
        return self.add_operator("SquaredL2Distance", [left, right], [blob_out])

    @layer
    def averaged_loss(self, blob_in: str, blob_out: str = "loss") -> str:
        """The mean of all elements."""
        return self.add_operator("AveragedLoss", [blob_in], [blob_out])

    @layer
    def accuracy(self, prediction: str, label: str, blob_out: str = "accuracy", *, top_k: int = 1) -> str:
        """The share of rows whose label is among the `top_k` largest predictions."""
        arguments: dict[str, ArgumentValue] = {} if top_k == 1 else {"top_k": top_k}
        return self.add_operator("Accuracy", [prediction, label], [blob_out], **arguments)
