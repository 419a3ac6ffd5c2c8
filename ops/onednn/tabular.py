"""Trees and scores by machine code of our own, with engine ONEDNN: where it may run, and on how many threads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dagexec.core.operator import Step, in_sequence
from dagexec.core.registry import operator
from dagexec.errors import UnsupportedFeatureError
from dagexec.ops.kernels.score_kernels import ScoreForm, score_call
from dagexec.ops.kernels.team import team_step
from dagexec.ops.kernels.tree_kernels import Call, walk_calls
from dagexec.ops.onednn.operator import OneDNNOperator
from dagexec.ops.tabular import ensemble
from dagexec.ops.tabular.ensemble import NUMBERS, Ensemble
from dagexec.ops.tabular.scores import Finish, ManyScores, OneScore

Array = npt.NDArray[Any]


class _Trees(OneDNNOperator):
    """Base of operators that walk trees."""

    metas = NUMBERS

    def prepare_primitive(self) -> Step:
        """Walks and scores in one row of native calls where sums are all that is needed, else walks alone."""
        assert isinstance(self, ensemble.TreeOperator)
        trees, x = self.ensemble(), self.rows()
        if trees.walked is None:
            raise UnsupportedFeatureError(f"{self.label}: it has more nodes than kernels count")
        self.answer(lambda: True)
        before = []
        if x.dtype != trees.dtype:
            given, x = x, self.scratch(x.shape, trees.dtype)
            before.append(lambda: np.copyto(x, given, casting="unsafe"))
        return in_sequence([*before, *(self.summed(trees, x) if trees.adds_up else self.placed(trees, x))])

    def summed(self, trees: Ensemble, x: Array) -> list[Step]:
        """Sums, and their scores."""
        raise NotImplementedError

    def placed(self, trees: Ensemble, x: Array) -> list[Step]:
        """Places of leaves, of which NumPy makes results."""
        assert isinstance(self, ensemble.TreeOperator) and trees.walked is not None
        places = self.scratch((len(x), trees.walked.width), np.int64)
        finish, units, count = self.finishing(trees), trees.walked.units, len(trees.forest.roots)

        def put_together() -> None:
            for first in range(0, len(x), _BLOCK_ROWS):
                block = slice(first, first + _BLOCK_ROWS)
                finish(block, *trees.put_together(-1 - places[block, :count] // units))

        return [self.walk(trees, x, places, []), put_together]

    def walk(self, trees: Ensemble, x: Array, out: Array, after: Sequence[tuple[Call, object]]) -> Step:
        """One step for the walks of all blocks and the calls `after` them."""
        assert trees.walked is not None
        found = walk_calls(self.onednn.machine, trees.walked, x, out)
        if found is None:
            raise UnsupportedFeatureError(f"{self.label}: no kernels run here")
        blocks, kept = found
        calls = [call for block in blocks for call in block]
        return team_step(None, 1, [[*calls, *(call for call, _ in after)]], (kept, after), self.label)

    def score(
        self, form: ScoreForm, sums: Array, out: Array, base: Array, extra: Sequence[float | Array],
        labels: Array | None = None, table: Array | None = None,
    ) -> tuple[Call, object]:  # fmt: skip
        """See `score_call`. Raises UnsupportedFeatureError where no kernel does that."""
        call = score_call(self.onednn.machine, form, sums, out, base, extra, labels, table)
        if call is None:
            raise UnsupportedFeatureError(f"{self.label}: there is no kernel for {form}")
        return call


_BLOCK_ROWS = 64
_KERNELS = ("NONE", "LOGISTIC", "SOFTMAX")
"""Transforms that kernels compute."""


class _Regressing(_Trees):
    def summed(self, trees: Ensemble, x: Array) -> list[Step]:
        """Sums where results go, and there their scores."""
        y, finish = self.y(0), trees.finish
        assert isinstance(finish, Finish)
        if finish.is_nothing:
            return [self.walk(trees, x, y, [])]
        transform = finish.transform if y.shape[1] > 1 or finish.transform == "PROBIT" else "NONE"
        form = ScoreForm(y.shape[1], transform, divides=finish.count != 1, spreads=False, names=False)
        extra = [float(finish.count)] if form.divides else []
        try:
            if transform not in _KERNELS:
                raise UnsupportedFeatureError(transform)
            return [self.walk(trees, x, y, [self.score(form, y, y, finish.base, extra)])]
        except UnsupportedFeatureError:
            return [self.walk(trees, x, y, []), lambda: np.copyto(y, finish.scores(y))]


@operator(ensemble.TreeEnsembleRegressor.schema, engine="ONEDNN")
class TreeEnsembleRegressor(_Regressing, ensemble.TreeEnsembleRegressor):
    """Numbers from trees whose nodes are numbered."""


@operator(ensemble.TreeEnsemble.schema, engine="ONEDNN")
class TreeEnsemble(_Regressing, ensemble.TreeEnsemble):
    """Numbers from trees whose nodes refer to each other by index."""


@operator(ensemble.TreeEnsembleClassifier.schema, engine="ONEDNN")
class TreeEnsembleClassifier(_Trees, ensemble.TreeEnsembleClassifier):
    """Classes from trees whose nodes are numbered."""

    def summed(self, trees: Ensemble, x: Array) -> list[Step]:
        """Sums, and their scores and labels; of texts the numbers, by which NumPy picks them."""
        labels, scores, finish = self.y(0), self.y(1), trees.finish
        names = ensemble.labels_of(self.arguments, self.label)
        numbers, table, after = labels, names, list[Step]()
        if names.dtype == np.object_:
            numbers, table = self.scratch(labels.shape, np.int64), np.arange(len(names))
            after = [lambda: np.take(names, numbers, out=labels, mode="clip")]
        sums = scores if isinstance(finish, ManyScores) else self.scratch((len(x), 1), np.float32)
        try:
            return [self.walk(trees, x, sums, [self._scored(finish, sums, scores, numbers, table)]), *after]
        except UnsupportedFeatureError:
            write = self.finishing(trees)
            sums = self.scratch(sums.shape, np.float32)
            return [self.walk(trees, x, sums, []), lambda: write(slice(None), sums, None)]

    def _scored(self, finish: Any, sums: Array, scores: Array, labels: Array, table: Array) -> tuple[Call, object]:
        inner: Finish = finish.finish
        transform = finish.transform if isinstance(finish, OneScore) else inner.transform
        if transform not in _KERNELS or (isinstance(finish, OneScore) and transform == "SOFTMAX"):
            raise UnsupportedFeatureError(f"{self.label}: there is no kernel for {transform}")
        spreads = isinstance(finish, OneScore)
        extra = [*finish.coefficients, finish.threshold] if spreads else []
        count = scores.shape[1]
        form = ScoreForm(count, transform if count > 1 else "NONE", divides=False, spreads=spreads, names=True)
        return self.score(form, sums, scores, inner.base, extra, labels, table)
