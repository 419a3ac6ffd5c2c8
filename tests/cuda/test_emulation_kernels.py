"""The emulation's kernels: barriers, shared memory, warps, atomics - and what is undefined on a GPU is an error."""

from __future__ import annotations

import numpy as np
import pytest

from tests.cuda.emulated.compiler import CompileError, KernelError
from tests.cuda.kernel_runs import run_kernel

TREE = r"""
extern "C" __global__ void k(const float* x, float* y) {
    __shared__ float part[256];
    int t = threadIdx.x;
    part[t] = x[blockIdx.x * 256 + t];
    __syncthreads();
    for (int half = 128; half; half /= 2) {
        if (t < half) part[t] += part[t + half];
        BARRIER
    }
    if (t == 0) y[blockIdx.x] = part[0];
}
"""


@pytest.mark.parametrize("order", ["forward", "reverse", "shuffle"])
def test_a_tree_in_shared_memory_sums_whatever_the_order_of_threads(
    order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DAGEXEC_EMULATED_ORDER", order)
    x, y = np.arange(512, dtype=np.float32), np.zeros(2, np.float32)
    run_kernel(TREE.replace("BARRIER", "__syncthreads();"), x, y, grid=(2, 1, 1), block=(256, 1, 1))
    assert y.tolist() == [x[:256].sum(), x[256:].sum()]


def test_a_missing_barrier_shows_as_another_sum_in_one_of_the_orders(monkeypatch: pytest.MonkeyPatch) -> None:
    x = np.arange(256, dtype=np.float32)
    found = set()
    for order in ("forward", "reverse", "shuffle"):
        monkeypatch.setenv("DAGEXEC_EMULATED_ORDER", order)
        y = np.zeros(1, np.float32)
        run_kernel(TREE.replace("BARRIER", ""), x, y, block=(256, 1, 1))
        found.add(y.tobytes())
    assert len(found) > 1


def test_a_thread_that_leaves_while_others_wait_is_an_error() -> None:
    source = 'extern "C" __global__ void k() { if (threadIdx.x == 3) return; __syncthreads(); }'
    with pytest.raises(KernelError, match=r"kernel k: a thread waits in __syncthreads\(\) that others"):
        run_kernel(source)


def test_threads_at_different_barriers_are_an_error() -> None:
    source = 'extern "C" __global__ void k() {\n if (threadIdx.x < 3)\n __syncthreads();\n else\n __syncthreads(); }'
    with pytest.raises(KernelError, match="different"):
        run_kernel(source)


def test_a_shuffle_whose_lanes_left_is_an_error() -> None:
    source = 'extern "C" __global__ void k(int* y) { if (threadIdx.x < 16) y[0] = __shfl_down_sync(~0u, 1, 1); }'
    with pytest.raises(KernelError, match="a warp operation waits"):
        run_kernel(source, np.zeros(1, np.int32))


def test_shuffles_and_votes_of_whole_and_partial_warps() -> None:
    source = r"""
    extern "C" __global__ void k(int* y, double* z) {
        int t = threadIdx.x, n = blockDim.x;
        y[t] = __shfl_xor_sync(0xffffffffu, t, 1);
        y[n + t] = __shfl_down_sync(0xffffffffu, t, 4);
        y[2 * n + t] = __shfl_up_sync(0xffffffffu, t, 4, 8);
        y[3 * n + t] = __shfl_sync(0xffffffffu, t, 5, 16);
        y[4 * n + t] = __popc(__ballot_sync(0xffffffffu, t % 3 == 0));
        double sum = t;
        for (int d = 16; d; d /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, d);
        z[t] = sum;
        y[5 * n + t] = __any_sync(0xffffffffu, t == 40) * 2 + __all_sync(0xffffffffu, t < 32);
        y[6 * n + t] = __syncthreads_or(t == 7) + 2 * __syncthreads_and(t == 7);
    }"""
    n = 64
    y, z = np.zeros((7, n), np.int32), np.zeros(n)
    run_kernel(source, y, z, block=(n, 1, 1))
    t = np.arange(n)
    assert (y[0] == t ^ 1).all()
    assert (y[1] == np.where(t % 32 + 4 < 32, t + 4, t)).all()
    assert (y[2] == np.where(t % 8 >= 4, t - 4, t)).all()
    assert (y[3] == t // 16 * 16 + 5).all()
    assert y[4, 0] == sum(i % 3 == 0 for i in range(32))
    assert y[4, 40] == sum(i % 3 == 0 for i in range(32, 64))
    assert (z == np.where(t < 32, sum(range(32)), sum(range(32, 64)))).all()
    assert (y[5] == np.where(t < 32, 1, 2)).all()
    assert (y[6] == 1).all()
    partial = np.zeros((7, 40), np.int32)
    run_kernel(source, partial, np.zeros(40), block=(40, 1, 1))
    assert partial[4, 39] == sum(i % 3 == 0 for i in range(32, 40))


def test_shared_memory_begins_as_rubbish_in_every_block_and_its_dynamic_part_is_guarded() -> None:
    source = r"""
    extern "C" __global__ void k(int* y, int beyond) {
        __shared__ int fixed[4];
        extern __shared__ int dynamic[];
        y[blockIdx.x * 2] = fixed[0];
        y[blockIdx.x * 2 + 1] = dynamic[0];
        fixed[0] = 1;
        dynamic[beyond] = 1;
    }"""
    y = np.zeros(4, np.int32)
    run_kernel(source, y, np.int32(0), grid=(2, 1, 1), block=(1, 1, 1), shared_bytes=16)
    assert (y.view(np.uint32) == 0xA5A5A5A5).all()
    with pytest.raises(KernelError, match="beyond the dynamic shared memory"):
        run_kernel(source, y, np.int32(4), block=(1, 1, 1), shared_bytes=16)


def test_integer_atomics_count_and_there_are_none_of_floats() -> None:
    source = r"""
    extern "C" __global__ void k(int* y, unsigned long long* z) {
        atomicAdd(&y[0], 1);
        atomicMax(&y[1], (int)threadIdx.x);
        atomicMin(&y[2], -(int)threadIdx.x);
        atomicCAS(&y[3], 0, (int)threadIdx.x + 1);
        atomicAdd(z, 1ull << 40);
    }"""
    y, z = np.zeros(4, np.int32), np.zeros(1, np.uint64)
    run_kernel(source, y, z)
    assert y.tolist() == [32, 31, -31, 1]
    assert z[0] == 32 << 40
    with pytest.raises(CompileError, match="atomicAdd"):
        run_kernel('extern "C" __global__ void k(float* y) { atomicAdd(y, 1.0f); }', np.zeros(1, np.float32))


def test_blocks_and_threads_have_three_axes() -> None:
    source = r"""
    extern "C" __global__ void k(int* y) {
        int b = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
        int t = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
        __syncthreads();
        y[b * 24 + t] += b * 24 + t + 1;
    }"""
    y = np.zeros((30, 24), np.int32)
    run_kernel(source, y, grid=(2, 3, 5), block=(4, 3, 2))
    assert (y.ravel() == np.arange(720) + 1).all()
