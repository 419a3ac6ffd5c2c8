"""EmbeddingBag by a kernel of our own."""

from __future__ import annotations

from functools import partial

from dagexec.core.operator import Step
from dagexec.core.registry import operator
from dagexec.errors import UnsupportedFeatureError
from dagexec.ops.engines.onednn.operator import OneDNNOperator
from dagexec.ops.families.index.indexing import failure_of
from dagexec.ops.families.sparse import embedding_bag
from dagexec.ops.kernels.bag_kernel import bag_step


@operator(embedding_bag.EmbeddingBag.schema, engine="ONEDNN")
class EmbeddingBag(OneDNNOperator, embedding_bag.EmbeddingBag):
    """Sums of rows in vectors."""

    def prepare_primitive(self) -> Step:
        """One call for all bags. Raises UnsupportedFeatureError where no kernel runs."""
        data, starts, ends, *rest = (self.x(index) for index in range(len(self.input_blobs)))
        indices = rest[0] if rest else None

        def check() -> None:
            if indices is not None:
                self.check(indices)

        step = bag_step(
            self.onednn.machine,
            (data, starts, ends, indices),
            self.y(0),
            is_mean=embedding_bag.takes_mean(self.call()),
            wraps=self.wraps,
            failure=partial(failure_of, check, self.label),
        )
        if step is None:
            raise UnsupportedFeatureError(f"{self.label}: there is no kernel for these tensors")
        return step
