"""Mistakes in formulas, geometry and rounding."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

_ROWS = ("tests/rows/test_bytes.py::test_a_row_of_nine_is_the_lone_row",)
_COPIES = ("tests/ops/kernels/test_copies.py",)

MUTANTS = (
    Mutant(
        "windows begin at the tail's padding",
        "ops/base/geometry.py",
        "offset = tap * self.dilation - self.head",
        "offset = tap * self.dilation - self.tail",
        ("tests/ops/base/test_geometry.py",),
    ),
    Mutant(
        "an average counts padding unless it is told to",
        "ops/families/pool/average.py",
        'with_padding=self.arguments.bool("count_include_pad"))\n\n        def',
        "with_padding=True)\n\n        def",
        ("tests/ops/pool/test_pool.py",),
    ),
    Mutant(
        "softmax exponentiates before it subtracts the maximum",
        "ops/families/activation/softmax.py",
        "                partial(np.subtract, x, rows, out=y),\n                partial(np.exp, y, out=y),\n"
        "                partial(np.add.reduce, y, axis=1, keepdims=True, out=rows),",
        "                partial(np.exp, x, out=y),\n"
        "                partial(np.add.reduce, y, axis=1, keepdims=True, out=rows),",
        ("tests/ops/activation/test_softmax.py",),
    ),
    Mutant(
        "a folded batch normalization loses its shift",
        "dagexec/compiler/passes/batch_norm_folding.py",
        "(bias * total.factor + total.shift)",
        "(bias * total.factor)",
        ("tests/compiler/passes/test_batch_norm_folding.py",),
    ),
    Mutant(
        "padding takes in what is shifted before a layer",
        "dagexec/compiler/passes/batch_norm_folding.py",
        "if affine is None or (layer.is_padded and affine.shift.any()):",
        "if affine is None:",
        ("tests/compiler/passes/test_batch_norm_folding.py",),
    ),
    Mutant(
        "quantized values are cut and not rounded",
        "ops/families/quantized/linear.py",
        "partial(np.rint, values, out=values),",
        "partial(np.trunc, values, out=values),",
        ("tests/ops/quantized/test_quantized_linear.py",),
    ),
    Mutant(
        "Adam corrects the second moment of the step after",
        "ops/families/optimize/adam.py",
        "self.correct(iteration + 1, 1.0 - beta1 ** (iteration + 1), 1.0 - beta2 ** (iteration + 1))",
        "self.correct(iteration + 1, 1.0 - beta1 ** (iteration + 1), 1.0 - beta2 ** (iteration + 2))",
        ("tests/ops/optimize/test_dense_updates.py",),
    ),
    Mutant(
        "Adam's epsilon is added before the root",
        "ops/families/optimize/adam.py",
        "        np.sqrt(second, out=work)\n        np.add(work, self._epsilon, out=work)\n",
        "        np.add(second, self._epsilon, out=work)\n        np.sqrt(work, out=work)\n",
        ("tests/ops/optimize/test_dense_updates.py",),
    ),
    Mutant(
        "a gradient passes where Relu is 0",
        "dagexec/core/derivatives.py",
        'is_free = x > right if node.kind == "maximum"',
        'is_free = x >= right if node.kind == "maximum"',
        ("tests/ops/elementwise/test_gradient_elementwise.py",),
    ),
    Mutant(
        "dropout scales by what is dropped",
        "ops/families/fill/dropout.py",
        "np.asarray(1 / (1 - ratio), work)",
        "np.asarray(1 / ratio, work)",
        ("tests/ops/fill/test_dropout.py",),
    ),
    Mutant(
        "narrow floats are summed in their own type",
        "ops/families/reduction/axes.py",
        "total = self.scratch(kept.shape, compute_dtype(y.dtype)) if is_narrow(y.dtype) else kept",
        "total = kept",
        ("tests/ops/reduction/test_reduction.py",),
    ),
    Mutant(
        "a last window of ceil_mode may begin behind the input",
        "ops/base/geometry.py",
        "self.ceil_mode:\n            out = -(-room // stride) + 1\n            if (out - 1) * stride >= size + head:",
        "self.ceil_mode:\n            out = -(-room // stride) + 1\n            if False:",
        ("tests/ops/base/test_geometry.py", "tests/ops/pool/test_pool.py"),
    ),
    Mutant(
        "an odd pixel of SAME_LOWER is at the tail",
        "ops/base/geometry.py",
        "(need - half, half) if self.legacy_pad is LegacyPad.SAME_LOWER",
        "(half, need - half) if self.legacy_pad is LegacyPad.SAME_LOWER",
        ("tests/ops/base/test_geometry.py",),
    ),
    Mutant(
        "sums of integers are taken for exact in float32",
        "ops/families/quantized/accumulation.py",
        "np.dtype(np.float32) if bound <= 1 << 24 else np.dtype(np.float64)",
        "np.dtype(np.float32) if bound <= 1 << 27 else np.dtype(np.float64)",
        ("tests/ops/quantized/test_quantized_products.py", "tests/ops/quantized/test_quantized_linear.py"),
    ),
    Mutant(
        "of operators with other arguments one stays",
        "dagexec/compiler/passes/common_subexpressions.py",
        "    return definition.engine, definition.values.key, device, len(definition.output)",
        "    return definition.engine, (), device, len(definition.output)",
        ("tests/compiler/passes/test_common_subexpressions.py",),
    ),
    Mutant(
        "the last sigmoid gate of a recurrent layer is not halved",
        "ops/families/recurrent/layer.py",
        "self.factors[:, : sizes.kind.sigmoids * sizes.hidden] = 0.5",
        "self.factors[:, : (sizes.kind.sigmoids - 1) * sizes.hidden] = 0.5",
        ("tests/ops/recurrent/test_recurrent.py",),
    ),
    Mutant(
        "a result is written over an input of another type",
        "dagexec/compiler/passes/in_place.py",
        "if others is None or name not in types or types[name] != types.get(result):",
        "if others is None or name not in types:",
        ("tests/compiler/passes/test_in_place.py",),
    ),
    Mutant(
        "a random operator counts as one that always gives the same",
        "dagexec/core/purity.py",
        " and _is_reproducible(definition)",
        "",
        ("tests/compiler/passes",),
    ),
    Mutant(
        "an index is not checked where it is used",
        "ops/kernels/gather_kernel.py",
        "    _load_index(code, index_bytes, RDX)",
        "    (code.load_short_number if index_bytes == 4 else code.load_number)(RAX, R8, RDX, index_bytes)",
        ("tests/ops/index/test_index.py",),
    ),
    Mutant(
        "the rest of a row that is copied is read as a whole vector",
        "ops/kernels/copy_kernels.py",
        "else build.load(source, mask=mask)",
        "else build.load(source)",
        _COPIES,
    ),
    Mutant(
        "the last columns of a matrix that is transposed are read as whole vectors",
        "ops/kernels/copy_kernels.py",
        "values.append(build.load(source, mask=across))",
        "values.append(build.load(source))",
        _COPIES,
    ),
    Mutant(
        "the last rows of a matrix that is transposed are written as whole vectors",
        "ops/kernels/copy_kernels.py",
        "build.store(turned[number], target, mask=down)",
        "build.store(turned[number], target)",
        _COPIES,
    ),
    Mutant(
        "rows of a product are multiplied together, however many there are",
        "ops/base/row_products.py",
        "if not owner.is_batch_invariant or not is_by_blas(y.dtype) or not (y.size and w.size):",
        "if True:",
        _ROWS,
    ),
    Mutant(
        "rows of stacks are multiplied together",
        "ops/base/row_products.py",
        "    if owner.is_batch_invariant:\n        x, w, y",
        "    if False:\n        x, w, y",
        _ROWS,
    ),
    Mutant(
        "convolutions by NumPy multiply all images at once",
        "ops/families/conv/convolution.py",
        "apart=self.is_batch_invariant",
        "apart=False",
        _ROWS,
    ),
    Mutant(
        "recurrent variants multiply all sequences at once",
        "ops/families/recurrent/variants.py",
        "        if self.is_batch_invariant:\n",
        "        if False:\n",
        _ROWS,
    ),
)
