"""Operators on tables by machine code of our own, with engine ONEDNN: where it may run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dagexec.core.dtypes import FLOAT32
from dagexec.core.operator import Step, in_sequence
from dagexec.core.registry import operator
from dagexec.errors import UnsupportedFeatureError
from dagexec.ops.engines.onednn.operator import OneDNNOperator
from dagexec.ops.families.tabular import columns, ensemble, linear, support_vectors
from dagexec.ops.families.tabular.ensemble import NUMBERS, Ensemble
from dagexec.ops.families.tabular.scores import LOGISTIC, NONE, PROBIT, SOFTMAX, Finish, ManyScores, OneScore
from dagexec.ops.kernels.row_kernels import FILLED, L1, L2, SCALED, Call, column_call, product_calls
from dagexec.ops.kernels.score_kernels import ScoreForm, score_call
from dagexec.ops.kernels.tables import in_pieces
from dagexec.ops.kernels.tree_kernels import walk_calls

Array = npt.NDArray[Any]
Scored = tuple[Call, object]

_BLOCK_ROWS = 64
_KERNELS = (NONE, LOGISTIC, SOFTMAX)
"""Transforms that kernels compute."""


class _Tabular(OneDNNOperator):
    """Base of operators that are rows of native calls."""

    def called(self, calls: Sequence[Call], kept: object) -> Step:
        """One step for the calls."""
        self.answer(lambda: True)
        return in_pieces([calls], kept, self.label)

    def found(self, made: Any) -> Any:
        """What a kernel is made as. Raises UnsupportedFeatureError for None."""
        if made is None:
            raise UnsupportedFeatureError(f"{self.label}: no kernels run here")
        return made

    def scored(self, finish: Finish, sums: Array, out: Array) -> Scored | None:
        """The call that makes results of sums; None where NumPy has to."""
        count = out.shape[1]
        transform = finish.transform if count > 1 or finish.transform == PROBIT else NONE
        if transform not in _KERNELS:
            return None
        form = ScoreForm(count, transform, divides=finish.count != 1, spreads=False, names=False)
        extra = [float(finish.count)] if form.divides else []
        return score_call(self.onednn.machine, form, sums, out, finish.base, extra, None, None)

    def named(self, finish: OneScore | ManyScores, sums: Array, scores: Array, labels: Array, names: Array) -> Any:
        """The call that makes scores and labels of sums, and steps behind it; None where NumPy has to."""
        spreads, inner = isinstance(finish, OneScore), finish.finish
        transform = finish.transform if isinstance(finish, OneScore) else inner.transform
        if transform not in (_KERNELS[:2] if spreads else _KERNELS):
            return None
        after: list[Step] = []
        places, table = labels, names
        if names.dtype == np.object_:
            places, table = self.scratch(labels.shape, np.int64), np.arange(len(names))
            after = [lambda: np.take(names, places, out=labels, mode="clip")]
        count = scores.shape[1]
        form = ScoreForm(count, transform if count > 1 else NONE, divides=False, spreads=spreads, names=True)
        extra: list[float | Array] = []
        if isinstance(finish, OneScore):
            extra = [*finish.coefficients, finish.threshold]
        call = score_call(self.onednn.machine, form, sums, scores, inner.base, extra, places, table)
        return None if call is None else (call, after)


class _Trees(_Tabular):
    """Base of operators that walk trees."""

    metas = NUMBERS

    def prepare_primitive(self) -> Step:
        """Walks and scores in one row of native calls where sums are all that is needed, else walks alone."""
        assert isinstance(self, ensemble.TreeOperator)
        trees, x = self.ensemble(), self.rows()
        if trees.walked is None:
            raise UnsupportedFeatureError(f"{self.label}: it has more nodes than kernels count")
        before: list[Step] = []
        if x.dtype != trees.dtype:
            given, x = x, self.scratch(x.shape, trees.dtype)
            before.append(lambda: np.copyto(x, given, casting="unsafe"))
        return in_sequence([*before, *(self.summed(trees, x) if trees.adds_up else self.placed(trees, x))])

    def summed(self, trees: Ensemble, x: Array) -> list[Step]:
        """Sums, and their scores."""
        raise NotImplementedError

    def placed(self, trees: Ensemble, x: Array) -> list[Step]:
        """Places of leaves, of which NumPy makes results."""
        assert isinstance(self, ensemble.TreeOperator)
        assert trees.walked is not None
        places = self.scratch((len(x), trees.walked.width), np.int64)
        finish, units, count = self.finishing(trees), trees.walked.units, len(trees.forest.roots)

        def put_together() -> None:
            for first in range(0, len(x), _BLOCK_ROWS):
                block = slice(first, first + _BLOCK_ROWS)
                finish(block, *trees.put_together(-1 - places[block, :count] // units))

        return [self.walk(trees, x, places), put_together]

    def walk(self, trees: Ensemble, x: Array, out: Array, *after: Scored) -> Step:
        """One step for the walks of all blocks and the calls `after` them."""
        assert trees.walked is not None
        blocks, kept = self.found(walk_calls(self.onednn.machine, trees.walked, x, out))
        calls = [call for block in blocks for call in block]
        return self.called([*calls, *(call for call, _ in after)], (kept, after))


class _Regressing(_Trees):
    def summed(self, trees: Ensemble, x: Array) -> list[Step]:
        """Sums where results go, and there their scores."""
        y, finish = self.y(0), trees.finish
        assert isinstance(finish, Finish)
        if finish.is_nothing:
            return [self.walk(trees, x, y)]
        call = self.scored(finish, y, y)
        if call is not None:
            return [self.walk(trees, x, y, call)]
        return [self.walk(trees, x, y), lambda: np.copyto(y, finish.scores(y))]


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
        """Sums, and their scores and labels."""
        labels, scores, finish = self.y(0), self.y(1), trees.finish
        assert isinstance(finish, OneScore | ManyScores)
        sums = scores if isinstance(finish, ManyScores) else self.scratch((len(x), 1), np.float32)
        named = self.named(finish, sums, scores, labels, ensemble.labels_of(self.arguments, self.label))
        if named is not None:
            return [self.walk(trees, x, sums, named[0]), *named[1]]
        write, sums = self.finishing(trees), self.scratch(sums.shape, np.float32)
        return [self.walk(trees, x, sums), lambda: write(slice(None), sums, None)]


class _Products(_Tabular):
    """Base of operators that multiply rows with coefficients."""

    metas = linear.NUMBERS

    def multiplied(self, x: Array, out: Array) -> tuple[list[Call], object]:
        """The calls that leave sums in `out`."""
        assert isinstance(self, linear.RowsOperator)
        one = linear.linear_of(self.call())
        calls, kept = self.found(product_calls(self.onednn.machine, x, one.weights, one.bias, out))
        return calls, kept


@operator(linear.LinearRegressor.schema, engine="ONEDNN")
class LinearRegressor(_Products, linear.LinearRegressor):
    """Numbers that are sums of columns."""

    def prepare_primitive(self) -> Step:
        """Sums where results go, and there their transforms."""
        (x, before), y, finish = self.rows(), self.y(0), self.finish()
        calls, kept = self.multiplied(x, y)
        if finish.is_nothing:
            return in_sequence([*before, self.called(calls, kept)])
        call = self.scored(finish, y, y)
        if call is None:
            return in_sequence([*before, self.called(calls, kept), lambda: np.copyto(y, finish.scores(y))])
        return in_sequence([*before, self.called([*calls, call[0]], (kept, call))])


@operator(linear.LinearClassifier.schema, engine="ONEDNN")
class LinearClassifier(_Products, linear.LinearClassifier):
    """Classes that sums of columns name."""

    def prepare_primitive(self) -> Step:
        """Sums, and their scores and labels. Raises UnsupportedFeatureError where NumPy has to name classes."""
        (x, before), labels, scores, finish = self.rows(), self.y(0), self.y(1), self.finish()
        sums = scores if isinstance(finish, ManyScores) else self.scratch((len(x), 1), np.float32)
        calls, kept = self.multiplied(x, sums)
        named = self.found(self.named(finish, sums, scores, labels, ensemble.labels_of(self.arguments, self.label)))
        return in_sequence([*before, self.called([*calls, named[0][0]], (kept, named)), *named[1]])


class _Support(_Tabular):
    """Base of operators that compare rows with support vectors."""

    metas = linear.NUMBERS

    def prepare_primitive(self) -> Step:
        """Sums and decisions by kernels, the function between them and what becomes of decisions by NumPy."""
        assert isinstance(self, support_vectors.SupportOperator)
        machine, (x, before), write = self.machine(), self.rows(), self.writing()
        comparison = machine.comparison
        sums = self.scratch((len(x), comparison.vectors.shape[1]), np.float32)
        decisions = self.scratch((len(x), machine.bias.size), np.float32)
        none, own = np.zeros(sums.shape[1], np.float32), self.onednn.machine
        compared = product_calls(own, x, comparison.vectors, none, sums, distances=comparison.distances)
        weighed = product_calls(own, sums, machine.weights, machine.bias, decisions)
        first, (calls, kept) = self.called(*self.found(compared)), self.found(weighed)
        after: list[Step] = [lambda: write(decisions)]
        if isinstance(machine, support_vectors.Classification) and machine.one_score is not None:
            names = np.ascontiguousarray(machine.labels[::-1])
            named = self.named(machine.one_score, decisions, self.y(1), self.y(0), names)
            if named is not None:
                calls, kept, after = [*calls, named[0][0]], (kept, named), named[1]
        last = self.called(calls, kept)
        change = (
            [] if comparison.kernel == support_vectors.LINEAR else [lambda: np.copyto(sums, comparison.values(sums))]
        )
        return in_sequence([*before, first, *change, last, *after])


@operator(support_vectors.SVMRegressor.schema, engine="ONEDNN")
class SVMRegressor(_Support, support_vectors.SVMRegressor):
    """A number a row."""


@operator(support_vectors.SVMClassifier.schema, engine="ONEDNN")
class SVMClassifier(_Support, support_vectors.SVMClassifier):
    """A class a row."""


class _Columns(_Tabular):
    """Base of operators that change columns of float32."""

    metas = (FLOAT32,)

    def changed(self, kind: str, numbers: Sequence[Array | float]) -> Step:
        """One call for all rows."""
        x, y = self.x(0), self.y(0)
        width = x.shape[-1] if x.ndim else 1
        rows, out = (array.reshape(array.size // max(width, 1), width) for array in (x, y))
        both = np.stack([np.broadcast_to(np.asarray(one, np.float32), (width,)) for one in numbers])
        call, kept = self.found(column_call(self.onednn.machine, kind, rows, out, both))
        return self.called([call], kept)


@operator(columns.Scaler.schema, engine="ONEDNN")
class Scaler(_Columns, columns.Scaler):
    """Columns moved and scaled."""

    def prepare_primitive(self) -> Step:
        """A difference and a product."""
        return self.changed(SCALED, self.numbers())


@operator(columns.Imputer.schema, engine="ONEDNN")
class Imputer(_Columns, columns.Imputer):
    """Missing numbers replaced."""

    def prepare_primitive(self) -> Step:
        """A choice."""
        values, replaced = self.numbers()
        return self.changed(FILLED, [replaced, values])


@operator(columns.Normalizer.schema, engine="ONEDNN")
class Normalizer(_Columns, columns.Normalizer):
    """Rows over their norms."""

    def prepare_primitive(self) -> Step:
        """A norm and a quotient. Raises UnsupportedFeatureError for the greatest number as norm."""
        norm = self.arguments.string("norm", "MAX")
        if norm not in (L1, L2):
            raise UnsupportedFeatureError(f"{self.label}: there is no kernel for {norm}")
        return self.changed(norm, [0.0, 0.0])
