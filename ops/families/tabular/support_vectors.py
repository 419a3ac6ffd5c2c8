"""SVMRegressor and SVMClassifier: rows compared with support vectors by a kernel function, by NumPy.

Several classes have a decision for each pair of them, and votes name the class. Probabilities are coupled from those of
pairs as Wu, Lin and Weng do (2004, second approach), by the iteration of LIBSVM. Where only two classes have one score,
labels and scores are those of onnxruntime.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import combinations

import numpy as np

from dagexec.core.arguments import Arguments
from dagexec.core.dtypes import FLOAT32, INT64, STRING
from dagexec.core.gradient import no_gradient
from dagexec.core.operator import Step
from dagexec.core.registry import new_operator
from dagexec.core.rows import first_axis
from dagexec.core.schema import OperatorCall, TensorType
from dagexec.errors import ModelFormatError
from dagexec.ops.families.tabular.attributes import Array, check_length, integers, numbers, onnx_name
from dagexec.ops.families.tabular.ensemble import labels_of
from dagexec.ops.families.tabular.linear import RowsOperator, products, row_count
from dagexec.ops.families.tabular.scores import HELP, LOGISTIC, NONE, TRANSFORMS, Finish, OneScore, transform_of

LINEAR, POLY, RBF, SIGMOID = KERNELS = ("LINEAR", "POLY", "RBF", "SIGMOID")
_MOST_TURNS = 100
_LEAST_PROBABILITY = 1e-7

Function = Callable[[Array], Array]


class Comparison:
    """Support vectors, and the function that rows are compared with them by.

    Attributes:
        vectors: float32 [columns, vectors]; coefficients of classes where there are no support vectors.
        kernel: one of KERNELS.
        gamma, addend, degree: of the kernel function.
    """

    def __init__(self, arguments: Arguments, label: str, vectors: Array, kernel: str) -> None:
        """Raises ModelFormatError."""
        self.vectors, self.kernel = np.ascontiguousarray(vectors.T, np.float32), kernel
        parameters = numbers(arguments, label, "kernel_params").astype(np.float32)
        if parameters.size not in (0, 3):
            raise ModelFormatError(f"{label}: attribute 'kernel_params' must have 3 numbers, found {parameters.size}")
        self.gamma, self.addend, self.degree = parameters if parameters.size else np.zeros(3, np.float32)

    @property
    def distances(self) -> bool:
        """The function is one of distances, not of products."""
        return self.kernel == RBF

    def sums(self, x: Array) -> Array:
        """Products of rows with vectors, or squares of their distances: [rows, vectors]."""
        if not self.distances:
            return products(x, self.vectors)
        found = np.zeros((len(x), self.vectors.shape[1]), np.float32)
        for column, row in zip(x.T, self.vectors, strict=True):
            found += np.square(column[:, np.newaxis] - row)
        return found

    def values(self, sums: Array) -> Array:
        """The function of these sums."""
        if self.kernel == LINEAR:
            return sums
        moved: Array = -self.gamma * sums if self.kernel == RBF else self.gamma * sums + self.addend
        if self.kernel == POLY:
            return moved ** np.float32(int(self.degree))
        found: Array = np.exp(moved) if self.kernel == RBF else np.tanh(moved)
        return found


def _kernel(arguments: Arguments, label: str) -> str:
    name = arguments.string("kernel_type", LINEAR)
    if name not in KERNELS:
        raise ModelFormatError(f"{label}: attribute 'kernel_type' is {name!r}; expected one of {KERNELS}")
    return name


def _rho(arguments: Arguments, label: str, count: int) -> Array:
    found = numbers(arguments, label, "rho").astype(np.float32)
    check_length(found, label, "rho", count)
    return found


def _vectors(given: Array, label: str, name: str, count: int, columns: int) -> Array:
    check_length(given, label, name, count * columns)
    return given.astype(np.float32).reshape(count, columns)


class Machine:
    """Rows to decisions: the function of all support vectors, times coefficients, and a number added to each.

    Attributes:
        comparison: of rows.
        weights: float32 [vectors, decisions].
        bias: float32 [decisions].
    """

    def __init__(self, comparison: Comparison, weights: Array, bias: Array) -> None:
        self.comparison, self.bias = comparison, bias
        self.weights = np.ascontiguousarray(weights, np.float32)

    def decisions(self, x: Array) -> Array:
        """[rows, decisions]."""
        values = self.comparison.values(self.comparison.sums(x))
        return products(values, self.weights) + self.bias


def _regression(call: OperatorCall) -> Machine:
    arguments, label, columns = call.arguments, call.label, row_count(call)[1]
    count = arguments.int("n_supports", 0)
    coefficients = numbers(arguments, label, "coefficients").astype(np.float32)
    rho = _rho(arguments, label, 1)
    if count <= 0:
        given = _vectors(coefficients, label, "coefficients", 1, columns)
        return Machine(Comparison(arguments, label, given, LINEAR), np.ones((1, 1)), rho)
    vectors = _vectors(numbers(arguments, label, "support_vectors"), label, "support_vectors", count, columns)
    check_length(coefficients, label, "coefficients", count)
    return Machine(Comparison(arguments, label, vectors, _kernel(arguments, label)), coefficients[:, np.newaxis], rho)


class Classification(Machine):
    """Decisions to classes.

    Attributes:
        labels: of the classes.
        pairs: classes that decisions are between; none where each decision is a score of a class.
        couples: factors and addends of the probabilities of pairs; none without probabilities.
        transform: of scores.
        is_positive: no coefficient is negative.
    """

    def __init__(self, call: OperatorCall) -> None:
        """Raises ModelFormatError."""
        arguments, label, columns = call.arguments, call.label, row_count(call)[1]
        self.labels = labels_of(arguments, label)
        self.transform = transform_of(arguments, label)
        classes = len(self.labels)
        coefficients = numbers(arguments, label, "coefficients").astype(np.float32)
        self.is_positive = bool((coefficients >= 0).all())
        self.pairs: list[tuple[int, int]] = []
        self.couples: tuple[Array, Array] | None = None
        counts = integers(arguments, label, "vectors_per_class")
        if not counts.size:
            given = _vectors(coefficients, label, "coefficients", classes, columns)
            bias = np.full(classes, _rho(arguments, label, max(1, len(arguments.floats("rho"))))[0])
            super().__init__(Comparison(arguments, label, given, LINEAR), np.eye(classes), bias)
            return
        check_length(counts, label, "vectors_per_class", classes)
        if (counts < 0).any() or classes < 2:
            raise ModelFormatError(f"{label}: it must have two classes or more, and no less than 0 vectors of each")
        self.pairs = list(combinations(range(classes), 2))
        total, starts = int(counts.sum()), np.cumsum(counts) - counts
        given = _vectors(coefficients, label, "coefficients", classes - 1, total)
        vectors = _vectors(numbers(arguments, label, "support_vectors"), label, "support_vectors", total, columns)
        weights = np.zeros((total, len(self.pairs)), np.float32)
        for number, (one, other) in enumerate(self.pairs):
            for owner, row in ((one, other - 1), (other, one)):
                own = slice(starts[owner], starts[owner] + counts[owner])
                weights[own, number] = given[row, own]
        rho = _rho(arguments, label, len(self.pairs))
        super().__init__(Comparison(arguments, label, vectors, _kernel(arguments, label)), weights, rho)
        factors, addends = (numbers(arguments, label, name).astype(np.float32) for name in ("prob_a", "prob_b"))
        if factors.size:
            check_length(factors, label, "prob_a", len(self.pairs))
            check_length(addends, label, "prob_b", len(self.pairs))
            self.couples = factors, addends

    @property
    def one_score(self) -> OneScore | None:
        """How the one decision between two classes becomes two scores; above 0 it is for the first class."""
        if len(self.pairs) != 1 or self.couples is not None:
            return None
        finish = Finish(np.empty(0, np.float32), 1, self.transform)
        return OneScore(finish, 0.0, sums_to_one=self.transform not in (NONE, LOGISTIC))

    @property
    def width(self) -> int:
        """The scores of a row."""
        count = len(self.labels)
        return max(2, len(self.pairs)) if self.pairs and self.couples is None else count

    def classes(self, decisions: Array) -> tuple[Array, Array]:
        """For rows of decisions, the number of the class, and its scores."""
        if not self.pairs:
            return self._greatest(decisions), TRANSFORMS[self.transform](decisions)
        votes = np.zeros((len(decisions), len(self.labels)), np.int64)
        for number, (one, other) in enumerate(self.pairs):
            first = decisions[:, number] > 0
            votes[:, one] += first
            votes[:, other] += ~first
        chosen = votes.argmax(axis=1)
        if self.couples is not None:
            return chosen, TRANSFORMS[self.transform](self._probabilities(decisions))
        if self.one_score is not None:
            return chosen, self.one_score.classes(decisions)[1]
        return chosen, TRANSFORMS[self.transform](decisions)

    def _greatest(self, scores: Array) -> Array:
        """The class with the greatest score; of two classes the second, where any score is great enough."""
        chosen: Array = scores.argmax(axis=1)
        if len(self.labels) != 2:
            return chosen
        most = scores.max(axis=1)
        found: Array = np.where(most >= 0.5 if self.is_positive else most > 0, 1, chosen)
        return found

    def _probabilities(self, decisions: Array) -> Array:
        """Those of classes, coupled from those of pairs."""
        assert self.couples is not None
        factors, addends = self.couples
        count = len(self.labels)
        own = 1 - TRANSFORMS[LOGISTIC](decisions * factors + addends)
        own = np.clip(own, np.float32(_LEAST_PROBABILITY), np.float32(1 - _LEAST_PROBABILITY))
        pairs = np.zeros((len(decisions), count, count), np.float32)
        for number, (one, other) in enumerate(self.pairs):
            pairs[:, one, other], pairs[:, other, one] = own[:, number], 1 - own[:, number]
        return _coupled(pairs)


def _coupled(pairs: Array) -> Array:
    """Probabilities [rows, classes] from those of pairs [rows, classes, classes]; rows end apart from each other."""
    rows, count = pairs.shape[:2]
    turned = pairs.transpose(0, 2, 1)
    q = -turned * pairs
    places = np.arange(count)
    q[:, places, places] = np.square(turned).sum(axis=2)
    p = np.full((rows, count), 1 / count, np.float32)
    going = np.arange(rows)
    for _ in range(_MOST_TURNS):
        mine = q[going]
        qp = (mine * p[going][:, np.newaxis]).sum(axis=2)
        pqp = (p[going] * qp).sum(axis=1)
        left = np.abs(qp - pqp[:, np.newaxis]).max(axis=1) >= 0.005 / count
        going, mine, qp, pqp = going[left], mine[left], qp[left], pqp[left]
        if not going.size:
            break
        own = p[going]
        for place in range(count):
            step = (pqp - qp[:, place]) / mine[:, place, place]
            own[:, place] += step
            more = 1 + step
            pqp = (pqp + step * (step * mine[:, place, place] + 2 * qp[:, place])) / more / more
            qp = (qp + step[:, np.newaxis] * mine[:, place]) / more[:, np.newaxis]
            own /= more[:, np.newaxis]
        p[going] = own
    return p


class SupportOperator(RowsOperator):
    """Base of operators that compare rows with support vectors."""

    def machine(self) -> Machine:
        """What it has."""
        raise NotImplementedError

    def prepare(self) -> Step:
        """All vectors for all rows, a column at a time."""
        machine, (x, before), write = self.machine(), self.rows(), self.writing()

        def step() -> None:
            for one in before:
                one()
            write(machine.decisions(x))

        return step

    def writing(self) -> Callable[[Array], None]:
        """A function of rows of decisions that writes results."""
        raise NotImplementedError


def infer_regressor(call: OperatorCall) -> Sequence[TensorType]:
    """float32 [rows, 1]."""
    return [TensorType((row_count(call)[0], call.once(_regression).bias.size), FLOAT32)]


_KERNEL_ARGS = {
    "coefficients": "what the function of each support vector is multiplied by",
    "kernel_params": "gamma, what is added, and the degree",
    "kernel_type": "LINEAR (default), POLY, RBF or SIGMOID",
    "post_transform": HELP,
    "rho": "what is added",
    "support_vectors": "[vectors, columns]",
}
_REGRESSOR = _KERNEL_ARGS | {
    "n_supports": "the number of support vectors (default 0: coefficients of a linear function)",
    "one_class": "1 for 1 where the result is above 0, else -1",
}


@new_operator(
    "SVMRegressor",
    infer=infer_regressor,
    doc="For each row of X the sum of coefficients times a function of it and of each support vector, plus rho. "
    "(ai.onnx.ml.)",
    input_names=("X",),
    output_names=("Y",),
    args=_REGRESSOR,
    required_args=("coefficients", "rho"),
    rows=first_axis,
    onnx=onnx_name("SVMRegressor", 1, *_REGRESSOR),
)
class SVMRegressor(SupportOperator):
    """A number a row."""

    def machine(self) -> Machine:
        """See SupportOperator."""
        return self.call().once(_regression)

    def writing(self) -> Callable[[Array], None]:
        """Numbers, or signs."""
        y, one_class = self.y(0), self.arguments.bool("one_class")
        finish = Finish(np.empty(0, np.float32), 1, transform_of(self.arguments, self.label))

        def write(decisions: Array) -> None:
            y[...] = np.where(decisions > 0, 1, -1) if one_class else finish.scores(decisions)

        return write


def infer_classifier(call: OperatorCall) -> Sequence[TensorType]:
    """Labels [rows], and float32 scores: of classes, or of pairs of classes where there are no probabilities."""
    found = call.once(Classification)
    rows = row_count(call)[0]
    meta = STRING if found.labels.dtype == np.object_ else INT64
    return [TensorType((rows,), meta), TensorType((rows, found.width), FLOAT32)]


_CLASSIFIER = _KERNEL_ARGS | {
    "classlabels_ints": "labels of the classes, if they are numbers",
    "classlabels_strings": "labels of the classes",
    "prob_a": "factors of the probabilities of pairs of classes",
    "prob_b": "addends of the probabilities of pairs of classes",
    "vectors_per_class": "how many support vectors each class has; without it a linear function for each class",
}


@new_operator(
    "SVMClassifier",
    infer=infer_classifier,
    doc="The class that wins most decisions between pairs of classes, and their probabilities, or the decisions. "
    "(ai.onnx.ml.)",
    input_names=("X",),
    output_names=("labels", "scores"),
    args=_CLASSIFIER,
    required_args=("coefficients", "rho"),
    rows=first_axis,
    onnx=onnx_name("SVMClassifier", 1, *_CLASSIFIER),
)
class SVMClassifier(SupportOperator):
    """A class a row."""

    def machine(self) -> Machine:
        """See SupportOperator."""
        return self.call().once(Classification)

    def writing(self) -> Callable[[Array], None]:
        """Labels and scores."""
        return partial(_write_classes, self.call().once(Classification), self.y(0), self.y(1))


def _write_classes(found: Classification, labels: Array, scores: Array, decisions: Array) -> None:
    chosen, scores[...] = found.classes(decisions)
    labels[...] = found.labels[chosen]


no_gradient("SVMRegressor", "SVMClassifier")
