"""Products with weights, most often constant ones, by the implementation that is measured to be fastest.

The weights come from memory, so that what counts for few rows is how fast they are read: 9216 x 4096 for one row takes
8.3 ms by the library's first implementation, 6.0 by that for AVX2, and 5.7 by the general product on weights as they
are; for 8 rows of 4096 x 4096 it is 3.6, 6.2 and 7.7 ms.

All products are computed in one thread, so that nothing is cut but what the operator cuts itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.lib.stride_tricks import as_strided

from dagexec.core.dtypes import from_numpy
from dagexec.core.operator import Step
from dagexec.errors import UnsupportedFeatureError
from dagexec.ops.engines.onednn.cutting import behind
from dagexec.ops.engines.onednn.descriptors import BIAS, DST, SRC, WEIGHTS, Array, Attributes, Descriptor
from dagexec.ops.engines.onednn.implementation import choose_implementation, rule
from dagexec.ops.engines.onednn.operator import OneDNNOperator
from dagexec.ops.engines.onednn.pieces import Piece, computed_in_pieces
from dagexec.ops.engines.onednn.primitive import PrimitiveDescriptor, describe
from dagexec.ops.engines.onednn.problem import Assembled, Candidate, Problem, assemble
from dagexec.ops.kernels.sharing import MOST_OF_ONE, pieces_of_bytes, pieces_of_products
from dagexec.ops.kernels.tables import even_shares
from dagexec.platform.records import dataclass

MATMUL, PACKED, AS_IT_IS = "matmul", "packed", "as it is"
"""Algorithms: matmul and inner product on weights in a layout of the implementation's choice; on those that are there.

Where the operator is no inner product, the last two are matmul, too.
"""
UNPACKED, INNER = "unpacked matmul", "inner product"
"""Instead of an inner product, matmul on weights as they are; instead of a matmul, inner product on packed ones."""

INNER_PRODUCT = "inner_product_forward"

_UNITS, _ROWS = 64, 8  # of a piece, at least
_PACKED_TWICE = 16 << 20  # bytes of weights that may be in memory for one row, and for several

MAX_MEASURED = 20 << 20
"""Bytes of weights: of more, a part of the units is measured, which takes as long for each byte."""

Request = Callable[[Mapping[int, Descriptor], Attributes], Sequence[object]]
"""What the library is asked with after the engine, for the layouts of the arguments."""


@dataclass(frozen=True)
class WeightedProduct:
    """A product with weights, input 1 of its operator.

    Attributes:
        function: of the library, without `dnnl_`.
        request: how it is requested.
        attributes: of the product.
        other: how the other of matmul and inner product is requested: with WEIGHTS transposed, and the BIAS of a matmul
            a row.
        arrays: by argument number: SRC, WEIGHTS and DST are matrices.
        further: operands of post-ops.
        units_axis: of WEIGHTS, along which there is a column of DST for each element.
        packs: True where weights are packed unless measuring says otherwise.
        key: what else the choice of an implementation depends on.
        constant: the weights never change.
    """

    function: str
    request: Request
    attributes: Attributes
    arrays: Mapping[int, Array]
    further: Mapping[int, tuple[Descriptor, Array]]
    units_axis: int
    packs: bool
    key: str
    other: Request | None = None
    constant: bool = True

    def cut(self, rows: range, units: range) -> WeightedProduct:
        """The product of some rows and some units."""
        cut = {0: (len(self.arrays[DST]), rows), 1: (self.arrays[DST].shape[1], units)}
        of_rows, of_units = slice(rows.start, rows.stop), slice(units.start, units.stop)
        weights = self.arrays[WEIGHTS]
        arrays = {
            **self.arrays,
            SRC: self.arrays[SRC][of_rows],
            WEIGHTS: weights[of_units] if self.units_axis == 0 else weights[:, of_units],
            DST: _packed(self.arrays[DST][of_rows, of_units]),
        }
        if BIAS in arrays:
            arrays[BIAS] = arrays[BIAS][..., of_units]
        further = {}
        for number, (layout, operand) in self.further.items():
            part, before = layout.part(cut)
            further[number] = part, behind(operand, before)
        return replace(self, attributes=self.attributes.part(cut), arrays=arrays, further=further)

    def part(self, units: int) -> Mapping[int, Array]:
        """The arrays of a product with so many units, of which only shapes and strides count."""
        weights, target = self.arrays[WEIGHTS], self.arrays[DST]
        sizes = (units, weights.shape[1]) if self.units_axis == 0 else (weights.shape[0], units)
        is_turned = weights.strides[0] < weights.strides[1]
        found = {
            **self.arrays,
            WEIGHTS: np.empty(sizes, weights.dtype, "F" if is_turned else "C"),
            DST: np.empty((len(target), units), target.dtype),
        }
        if BIAS in found:
            found[BIAS] = np.empty((*found[BIAS].shape[:-1], units), found[BIAS].dtype)
        return found


def _packed(rows: Array) -> Array:
    """Rows, or a part of one row, with the strides of packed ones."""
    return rows if len(rows) > 1 else as_strided(rows, strides=(rows.nbytes, rows.itemsize))


class MeasuredProduct(OneDNNOperator):
    """Base of operators that multiply with constant weights."""

    def product(self, product: WeightedProduct) -> Assembled:
        """The steps of the implementation chosen for `product`.

        Raises UnsupportedFeatureError where there is only the library's reference, or nothing that is batch-invariant.
        """
        whole = self._problem(product, product.arrays)
        chosen = self._chosen_for_all(product, whole) if self.is_batch_invariant else self._chosen(product, whole)
        operands = {number: array for number, (_, array) in product.further.items()}

        def pack(
            number: int, array: Array, source: Descriptor, target: Descriptor, making: object = None
        ) -> tuple[Array, Step]:
            return self.parameter(1, array, source, target)

        arrays = {**product.arrays, **operands}
        parts = self._parts(product, chosen.name)
        if len(parts) < 2:
            return assemble(whole, chosen, arrays, self.working_memory, pack)
        return computed_in_pieces(self.label, parts, len(parts), self.working_memory, pack, arrays)

    def _parts(self, product: WeightedProduct, name: str) -> list[Piece]:
        """Products of some rows, or of one row some units, by the implementation of a name; none where it is not cut.

        The library writes whole rows alone.
        """
        weights, (rows, units) = product.arrays[WEIGHTS], product.arrays[DST].shape
        every = range(rows), range(units)
        if rows == 1 and weights.nbytes <= _PACKED_TWICE:
            count, least = pieces_of_bytes(weights.nbytes, MOST_OF_ONE), _UNITS
        else:
            count, least = pieces_of_products(rows * weights.size, self.onednn.isa.lanes), _ROWS
        whole = len(every[rows == 1])
        found: list[Piece] = []
        for part in even_shares(whole // least, count) if count > 1 and whole >= 2 * least else ():
            indices = range(part.start * least, whole if part.stop == whole // least else part.stop * least)
            cut = product.cut(*((every[0], indices) if rows == 1 else (indices, every[1])))
            problem = self._problem(cut, cut.arrays)
            one = problem.named(name)
            if one is None:
                return []
            found.append(
                (problem, one, {**cut.arrays, **{number: array for number, (_, array) in cut.further.items()}})
            )
        return found

    def _chosen_for_all(self, product: WeightedProduct, whole: Problem) -> Candidate:
        """What is chosen for the first number of rows, for all numbers."""
        names = self.names_for_all
        if whole.geometry not in names:
            names[whole.geometry] = self._chosen(product, whole).name
        name = names[whole.geometry]
        found = whole.named(name)
        if found is None:
            raise UnsupportedFeatureError(f"{self.label}: oneDNN has no {name} for {whole.batch} rows")
        return found

    def _chosen(self, product: WeightedProduct, whole: Problem) -> Candidate:
        weights = product.arrays[WEIGHTS]
        units = weights.shape[product.units_axis]
        if not product.constant:
            return rule(whole)
        if weights.nbytes <= MAX_MEASURED:
            return choose_implementation(whole)
        if product.further:
            return rule(whole)
        part = product.part(max(1, units * MAX_MEASURED // weights.nbytes // 16 * 16))
        name = choose_implementation(self._problem(product, part)).name
        return whole.named(name) or rule(whole)

    def _problem(self, product: WeightedProduct, arrays: Mapping[int, Array]) -> Problem:
        library, weights = self.onednn, arrays[WEIGHTS]
        meta = from_numpy(weights.dtype)
        tensors = {number: self.packed(array) for number, array in arrays.items()}
        wanted = {WEIGHTS: Descriptor.any_layout(library, weights.shape, meta)}
        is_inner = product.function == INNER_PRODUCT
        turned: dict[int, Descriptor] = {}
        if product.other is not None:
            turned = {WEIGHTS: self.packed(weights.T)}
            turned |= {BIAS: self.packed(arrays[BIAS].reshape(1, -1))} if BIAS in arrays else {}

        def ask(algorithm: str, own: bool) -> PrimitiveDescriptor:
            if algorithm in (MATMUL, UNPACKED, INNER):
                if product.other is None:
                    raise UnsupportedFeatureError(f"{self.label}: there is one way to multiply")
                free = {} if algorithm == UNPACKED else {WEIGHTS: Descriptor.any_layout(library, weights.T.shape, meta)}
                arguments = product.other({**tensors, **turned, **free}, product.attributes)
                function = "matmul" if is_inner else INNER_PRODUCT
                return describe(library, self.label, function, library.engine, *arguments)
            arguments = product.request({**tensors, **(wanted if algorithm == PACKED else {})}, product.attributes)
            return describe(library, self.label, product.function, library.engine, *arguments)

        types = {number: from_numpy(array.dtype) for number, array in arrays.items()}
        types |= {number: from_numpy(array.dtype) for number, (_, array) in product.further.items()}
        tensors_of_all = {**tensors, **{number: layout for number, (layout, _) in product.further.items()}}
        strides = ["turned" if weights.strides[0] < weights.strides[1] else "straight"]
        strides += ["turned source"] if arrays[SRC].strides[0] < arrays[SRC].strides[1] else []
        rows = len(arrays[SRC])
        parts = [
            f"{product.function} {meta}",
            f"weights {list(weights.shape)} {' '.join(strides)}",
            "bias" if BIAS in arrays else "no bias",
            product.key,
            "rows of any number" if self.is_batch_invariant else f"rows {rows}",
        ]
        return Problem(
            library=library,
            label=self.label,
            key=" | ".join(parts),
            ask=ask,
            tensors={number: (layout, types[number]) for number, layout in tensors_of_all.items()},
            result=DST,
            plain={WEIGHTS: tensors[WEIGHTS]},
            packed=frozenset({WEIGHTS}),
            constant=frozenset({WEIGHTS} if product.constant else ()),
            taps=1,
            fan_in=arrays[SRC].shape[1],
            algorithms=self._algorithms(product, is_inner),
            views=dict.fromkeys((MATMUL, UNPACKED, INNER), turned),
            cold=self.arguments.bool("cold_weights", True),
            batch=rows,
            open=True,
            invariant=self.is_batch_invariant,
        )

    def _algorithms(self, product: WeightedProduct, is_inner: bool) -> tuple[str, ...]:
        """Those to ask for, in order."""
        if not self.is_batch_invariant:
            packed = (MATMUL, PACKED) if is_inner else (PACKED,)
            return (*packed, AS_IT_IS) if product.packs else (AS_IT_IS, *packed)
        matmul = (UNPACKED, MATMUL) if is_inner else (AS_IT_IS, PACKED)
        return (*(matmul[1:] if product.constant else matmul), PACKED if is_inner else INNER)
