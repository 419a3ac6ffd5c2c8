"""CTCBeamSearchDecoder: the likeliest labels of sequences, by a search over prefixes.

Graves and Jaitly, 2014 (ICML); Hannun et al., 2014, arXiv:1408.2873. Label 0 is the blank. The likelihood of a prefix
is kept as two numbers, of paths that end in a blank and of others, in float32 as Caffe2 computes them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from dagexec.core.dtypes import FLOAT32, INT32
from dagexec.core.gradient import no_gradient
from dagexec.core.schema import OperatorCall, TensorType
from dagexec.errors import ArgumentError
from dagexec.ops.base.array_function import array_function
from dagexec.ops.base.blocks import Array

Prefix = tuple[int, ...]

_ZERO = np.float32(0)


class _Beam:
    """The prefixes that are followed, and likelihoods of what followed them at the time before.

    Attributes:
        kept: the likelihoods of the prefixes, of paths with a blank at the end and of others.
        best: the likeliest ones, with their likelihoods, in order.
    """

    def __init__(self) -> None:
        self.kept: dict[Prefix, tuple[np.float32, np.float32]] = {(): (np.float32(1), _ZERO)}
        self.best: list[tuple[Prefix, np.float32]] = []
        self._longer: dict[Prefix, tuple[Array, Array]] = {}
        self._alone: dict[Prefix, tuple[np.float32, np.float32]] = {}

    def follow(self, row: Array, width: int, threshold: float) -> None:
        """One time further, with the probabilities of its labels. No unlikely label is tried, if any is likely."""
        tried = row > np.float32(threshold)
        tried = tried if tried.any() else np.ones_like(tried)
        longer, touched = {}, {}
        for prefix, (blank, other) in self.kept.items():
            blanks, others = self._before(prefix, len(row))
            new = np.ones(len(row), np.bool_)
            new[[kept[-1] for kept in self.kept if kept and kept[:-1] == prefix]] = False
            of_labels = row * (blank + other)
            if prefix:
                of_labels[prefix[-1]] = row[prefix[-1]] * blank
            tries = tried.copy()
            tries[0] = False
            of_blanks = np.where(new & tries, row[0] * (blanks + others), _ZERO)
            longer[prefix] = of_blanks, np.where(tries, of_labels + np.where(new, row * others, _ZERO), _ZERO)
            touched[prefix] = tries
        alone = {}
        for prefix, (blank, other) in self.kept.items():
            again = bool(prefix) and bool(tried[prefix[-1]])
            if not (again or tried[0]):
                continue
            of_blank = row[0] * (blank + other) if tried[0] else _ZERO
            of_other = row[prefix[-1]] * other if again else _ZERO
            if prefix and prefix[:-1] in longer:
                blanks, others = longer[prefix[:-1]]
                blanks[prefix[-1]] += of_blank
                others[prefix[-1]] += of_other
                touched[prefix[:-1]][prefix[-1]] = True
            else:
                alone[prefix] = of_blank, of_other
        self._longer, self._alone = longer, alone
        found = sorted(self._candidates(touched, width), key=lambda one: (-(one[1] + one[2]), one[0]))[:width]
        self.kept = {prefix: (blank, other) for prefix, blank, other in found}
        self.best = [(prefix, blank + other) for prefix, blank, other in found]

    def _before(self, prefix: Prefix, labels: int) -> tuple[Array, Array]:
        """The likelihoods, before, of the prefix and one label more."""
        blanks, others = self._longer.get(prefix) or (np.zeros(labels, np.float32), np.zeros(labels, np.float32))
        for longer, (blank, other) in self._alone.items():
            if longer and longer[:-1] == prefix:
                blanks[longer[-1]], others[longer[-1]] = blank, other
        return blanks, others

    def _candidates(self, touched: dict[Prefix, Array], width: int) -> Iterator[tuple[Prefix, np.float32, np.float32]]:
        """Those that can be among the best `width`."""
        for prefix, (blanks, others) in self._longer.items():
            labels = np.flatnonzero(touched[prefix])
            totals = (blanks + others)[labels]
            if len(labels) > width:
                labels = labels[totals >= np.partition(totals, -width)[-width]]
            for label in labels.tolist():
                yield (*prefix, label), blanks[label], others[label]
        yield from ((prefix, *pair) for prefix, pair in self._alone.items())


def _decoded(call: OperatorCall) -> list[Array]:
    arguments, scores = call.arguments, call.known_value(0)
    lengths = call.known_value(1) if len(call.inputs) > 1 else np.full(scores.shape[1], len(scores))
    candidates, width = arguments.int("num_candidates", 1), arguments.int("beam_width", 10)
    sizes = np.zeros((scores.shape[1], candidates), np.int32)
    likelihoods = np.zeros(sizes.shape, np.float32)
    values: list[int] = []
    for number, length in enumerate(lengths):
        beam = _Beam()
        for row in scores[:length, number]:
            beam.follow(row, width, arguments.float("prune_threshold", 0.001))
        for place, (prefix, likelihood) in enumerate(beam.best[:candidates]):
            sizes[number, place], likelihoods[number, place] = len(prefix), likelihood
            values += prefix
    return [sizes.reshape(-1), np.array(values, np.int32), likelihoods.reshape(-1)][: len(call.definition.output)]


def infer_beam_search(call: OperatorCall) -> list[TensorType]:
    """A length and a likelihood for each candidate of a sequence, and all labels."""
    call.require_types(0, FLOAT32)
    times, sequences, labels = call.require_rank(0, 3)
    if not labels:
        raise call.fail("there must be at least one label, which is the blank")
    if len(call.inputs) == 2:
        call.require_types(1, INT32)
        call.require_shape(1, (sequences,), "a length for each sequence")
        if ((call.known_value(1) < 0) | (call.known_value(1) > times)).any():
            raise call.fail(f"lengths must be in [0, {times}]")
    candidates = call.arguments.int("num_candidates", 1)
    if not 1 <= candidates <= call.arguments.int("beam_width", 10):
        raise ArgumentError(f"{call.label}: 'num_candidates' must be from 1 to 'beam_width', found {candidates}")
    types = [INT32, INT32, FLOAT32]
    return [TensorType(found.shape, meta) for found, meta in zip(call.once(_decoded), types, strict=False)]


@array_function(
    "CTCBeamSearchDecoder",
    inputs=(1, 2),
    outputs=(2, 3),
    infer=infer_beam_search,
    doc="The likeliest labels of each sequence, one candidate after another, by a search over prefixes; label 0 is the "
    "blank.",
    input_names=("probabilities, times x sequences x labels", "lengths"),
    output_names=("lengths", "labels", "likelihoods"),
    args={
        "beam_width": "prefixes that are followed (default 10)",
        "num_candidates": "results of a sequence (default 1)",
        "prune_threshold": "labels of no more than that are not tried, unless all are (default 0.001)",
    },
    value_inputs=(0, 1),
)
def beam_search(call: OperatorCall, *_inputs: Array) -> Sequence[Array]:
    """What inference has found."""
    return call.once(_decoded)


no_gradient("CTCBeamSearchDecoder")
