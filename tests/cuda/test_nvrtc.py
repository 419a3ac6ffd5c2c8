"""Kernels under the real NVRTC, where CuPy and NVRTC are installed: a device is not needed.

All that the operator tests ever compile is checked by `python -m tests.cuda.check_kernels`; here are a few.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dagexec.devices.cuda.prelude import PRELUDE
from tests.cuda.emulated import emulated
from tests.cuda.emulated.compiler import CompileError, build
from tests.cuda.nvrtc import architectures, assembly, compile_error, errors_of, nvrtc
from tests.ops.running import check_on_cuda, operator_def

pytestmark = pytest.mark.skipif(nvrtc() is None, reason="CuPy or NVRTC is not installed; make cuda-check installs them")

rng = np.random.default_rng(5)
IMAGES, ROWS = rng.normal(size=(2, 4, 6, 6)).astype(np.float32), rng.normal(size=(5, 7)).astype(np.float32)
EXAMPLES: dict[str, tuple[Any, ...]] = {
    "Relu": (ROWS,),
    "Sigmoid": (ROWS,),
    "Softmax": (ROWS,),
    "Transpose": (IMAGES,),
    "MaxPool": (IMAGES,),
    "Add": (ROWS, ROWS[0]),
    "SumReduceLike": (ROWS, ROWS[0]),
}


def test_the_prelude_compiles_for_every_architecture_and_a_wrong_kernel_does_not() -> None:
    assert architectures()
    for architecture in architectures():
        assert compile_error(PRELUDE + 'extern "C" __global__ void k() {}', architecture) is None
        found = compile_error(PRELUDE + 'extern "C" __global__ void k() { no_such_function(); }', architecture)
        assert found is not None
        assert "no_such_function" in found


FUNCTIONS = """
expf logf log1pf expm1f sqrtf cbrtf tanhf sinf cosf tanf asinf acosf atanf sinhf coshf erff floorf
ceilf rintf fabsf truncf exp2f log2f log10f roundf erfcf asinhf acoshf atanhf lgammaf tgammaf
nearbyintf exp10f rsqrtf __expf __logf __saturatef exp log log1p expm1 sqrt cbrt tanh sin cos tan
asin acos atan sinh cosh erf floor ceil rint fabs trunc exp2 log2 log10 round erfc asinh acosh atanh
lgamma tgamma nearbyint exp10 rsqrt isnan isinf isfinite signbit abs __float_as_uint __float_as_int
__float2int_rn __float2int_rz __float2int_rd __float2ll_rn
""".split()  # noqa: SIM905
EXPRESSIONS = (
    "powf(x, y)", "pow(x, y)", "fmodf(x, y)", "copysignf(x, y)", "hypotf(x, y)", "atan2f(x, y)", "fminf(x, y)",
    "fmaxf(x, y)", "fdimf(x, y)", "nextafterf(x, y)", "remainderf(x, y)", "fmaf(x, y, x)", "ldexpf(x, 3)",
    "min(i, 3)", "max(i, 3)", "min(3ll, j)", "max(3ull, k)", "min(x, y)", "max((double)x, 2.0)", "__fdividef(x, y)",
    "__fadd_rn(x, y)", "__fmul_rn(x, y)", "__dadd_rn(x, y)", "__fmaf_rn(x, y, x)", "__fsqrt_rn(x)", "__umul64hi(k, k)",
    "__mul64hi(j, j)", "__umulhi(i, i)", "__mulhi(i, i)", "__uint_as_float(i)", "__int_as_float(i)",
    "__double_as_longlong(x)", "__longlong_as_double(j)", "__popc(i)", "__popcll(k)", "__clz(i)", "__clzll(j)",
    "__ffs(i)", "__ffsll(j)", "__brev(i)", "__funnelshift_l(i, i, 3)", "__byte_perm(i, i, 3)", "__ldg(p)",
    "make_float4(x, y, x, y).w", "make_int2(i, i).y", "make_double2(x, y).x", "make_uint4(i, i, i, i).z", "warpSize",
    "__shfl_xor_sync(~0u, x, 1)", "__shfl_down_sync(~0u, j, 1)", "__shfl_up_sync(~0u, i, 1, 8)",
    "__shfl_sync(~0u, k, 0)", "__ballot_sync(~0u, i)", "__any_sync(~0u, i)", "__all_sync(~0u, i)",
    "__syncthreads_or(i)", "__syncthreads_and(i)", "atomicAdd(&s, 1)", "atomicMax(&s, 1)", "atomicMin(&s, 1)",
    "atomicCAS(&s, 0, 1)", "atomicExch(&s, 1)", "atomicOr(&s, 1)", "atomicSub(&s, 1)", "atomicAdd(&u, 1ull)",
    "atomicInc(&v, 1u)",
)  # fmt: skip
EVERYTHING = (
    'extern "C" __global__ void __launch_bounds__(256)\n'
    "k(const float* __restrict__ p, double* r, int i, long long j) {\n"
    "    __shared__ int s; __shared__ unsigned long long u; __shared__ unsigned int v;\n"
    "    float x = p[0], y = p[1]; unsigned long long k = j; extern __shared__ char dynamic[];\n"
    "    s = 0; u = 0; v = 0; dynamic[0] = 0; __syncthreads(); __syncwarp(); __threadfence();\n"
    + "".join(
        f"    r[{n}] = (double)({one});\n" for n, one in enumerate([*EXPRESSIONS, *(f"{f}(x)" for f in FUNCTIONS)])
    )
    + "}\n"
)


def test_whatever_the_emulation_offers_a_kernel_nvrtc_offers_too() -> None:
    assert build(EVERYTHING)
    for architecture in architectures():
        assert compile_error(EVERYTHING, architecture) is None
    for missing in ("INFINITY", "NAN", "std::exp(x)", "(uint32_t)i"):
        source = f'extern "C" __global__ void k(float x, int i, double* r) {{ r[0] = (double)({missing}); }}'
        assert compile_error(source, architectures()[0]) is not None
        with pytest.raises(CompileError):
            build(source)


@pytest.mark.parametrize("operator_type", EXAMPLES)
def test_kernels_that_the_emulation_runs_compile_by_nvrtc(
    operator_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.ops.running import run_operator

    monkeypatch.setenv("DAGEXEC_KERNEL_SOURCES", str(tmp_path))
    inputs = EXAMPLES[operator_type]
    arguments: dict[str, Any] = {"kernel": 2, "stride": 2} if operator_type == "MaxPool" else {}
    outputs = run_operator(operator_type, list(inputs), **arguments)
    names = [f"x{number}" for number in range(len(inputs))]
    definition = operator_def(operator_type, names, ["y0"], **arguments)
    with emulated(record=False):  # where there is a device, too: what is compiled for it leaves no sources
        check_on_cuda(definition, dict(zip(names, inputs, strict=True)), outputs)
    sources = list(tmp_path.glob("*.cu"))
    assert sources
    assert not errors_of(sources)
    for source in sources:
        text = source.read_text()
        for architecture in architectures():
            assert ".local" not in assembly(text, architecture), f"threads keep arrays in local memory:\n{text}"


def test_every_kernel_that_was_collected_compiles_by_nvrtc() -> None:
    folder = os.environ.get("DAGEXEC_KERNEL_SOURCES")
    if not folder:
        pytest.skip("no kernels are collected: python -m tests.cuda.check_kernels does that")
    assert not errors_of(sorted(Path(folder).glob("*.cu")))
