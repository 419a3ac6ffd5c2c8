"""The emulation's kernels: barriers, shared memory, warps, atomics - and what is undefined on a GPU is an error."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dagexec.devices.cuda.kernels import Launch, compiled
from tests.cuda.emulated import emulated
from tests.cuda.emulated.compiler import CompileError, KernelError
from tests.cuda.kernel_runs import run_kernel
from tests.cuda.memory_copies import from_device, to_device

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


@pytest.mark.parametrize("order", ["forward", "reverse", "shuffle"])
def test_a_missing_barrier_is_an_error_whatever_the_order_of_threads(
    order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DAGEXEC_EMULATED_ORDER", order)
    x, y = np.arange(256, dtype=np.float32), np.zeros(1, np.float32)
    with pytest.raises(KernelError, match="with no barrier between"):
        run_kernel(TREE.replace("BARRIER", ""), x, y, block=(256, 1, 1))


def test_a_barrier_of_one_warp_orders_its_threads_and_no_others() -> None:
    source = r"""
    extern "C" __global__ void k(int* y) {
        __shared__ int part[64];
        int t = threadIdx.x;
        part[t] = t;
        __syncwarp();
        y[t] = part[t ^ DISTANCE];
    }"""
    y = np.zeros(64, np.int32)
    run_kernel(source.replace("DISTANCE", "1"), y, block=(64, 1, 1))
    assert (y == np.arange(64) ^ 1).all()
    with pytest.raises(KernelError, match="a thread reads what another wrote"):
        run_kernel(source.replace("DISTANCE", "32"), y, block=(64, 1, 1))


def test_barriers_of_many_blocks_are_not_mixed_up() -> None:
    source = r"""
    extern "C" __global__ void k(int* y) {
        __shared__ int part[2];
        for (int i = 0; i < 100; ++i) {
            part[threadIdx.x] = i;
            __syncthreads();
            if (part[1 - threadIdx.x] != i) atomicExch(y, 1);
            __syncthreads();
        }
    }"""
    y = np.zeros(1, np.int32)
    run_kernel(source, y, grid=(200, 1, 1), block=(2, 1, 1))
    assert y.tolist() == [0]


def run_on_device(source: str, *arrays: np.ndarray[Any, Any], grid: int = 1, block: int = 32) -> list[Any]:
    """The arrays after kernel `k` of `source`, on an emulated device."""
    with emulated():
        held = [to_device(array) for array in arrays]
        Launch(compiled("k", source), held, blocks=grid, threads=block)()
        return [from_device(array) for array in held]


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ("y[0] = x[t];", "two threads write the same bytes"),
        ("y[t] = x[t]; y[(t + 1) % 64] += 1;", "two threads write|a thread reads what another wrote"),
        ("y[t] = y[63 - t];", "a thread writes what another read|a thread reads what another wrote"),
        ("y[t] = x[t + 1];", "a read of memory that is not the device's"),
        ("y[t - 1] = x[t];", "a write to memory that is not the device's"),
        ("((char*)y)[4 * t + 253] = 0;", "a write to memory"),
    ],
)
def test_a_kernel_whose_threads_meet_in_memory_or_leave_it_is_an_error(statement: str, message: str) -> None:
    source = f"""
    extern "C" __global__ void k(const float* x, float* y) {{
        int t = blockIdx.x * blockDim.x + threadIdx.x;
        {statement}
    }}"""
    x = np.arange(64, dtype=np.float32)
    for grid, block in ((1, 64), (2, 32)):
        with pytest.raises(KernelError, match=message):
            run_on_device(source, x, x, grid=grid, block=block)


def test_blocks_of_one_launch_have_no_order_though_their_threads_have() -> None:
    source = r"""
    extern "C" __global__ void k(float* y) {
        y[threadIdx.x] = 1;
        __syncthreads();
        y[(threadIdx.x + 1) % 32] += 1;
    }"""
    (y,) = run_on_device(source, np.zeros(32, np.float32))
    assert (y == 2).all()
    with pytest.raises(KernelError, match="with no barrier between"):
        run_on_device(source, np.zeros(32, np.float32), grid=2)


def test_a_vector_of_four_is_watched_as_its_elements_are() -> None:
    source = r"""
    extern "C" __global__ void k(const float4* x, float* y) {
        float4 v = x[threadIdx.x];
        *(float4*)(y + 4 * threadIdx.x) = make_float4(v.w, v.z, v.y, v.x);
        y[4 * threadIdx.x + WHERE] = 0;
    }"""
    x = np.arange(128, dtype=np.float32)
    _, y = run_on_device(source.replace("WHERE", "3"), x, x)
    assert (y.reshape(32, 4) == x.reshape(32, 4)[:, ::-1] * [1, 1, 1, 0]).all()
    with pytest.raises(KernelError, match=r"with no barrier between|not the device's"):
        run_on_device(source.replace("WHERE", "4"), x, x)


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


def test_shared_memory_that_nobody_wrote_and_what_lies_beyond_it_are_out_of_bounds() -> None:
    source = r"""
    extern "C" __global__ void k(int* y, int beyond) {
        __shared__ int fixed[4];
        extern __shared__ int dynamic[];
        y[0] = fixed[0] + dynamic[0];
        fixed[0] = 1;
        dynamic[beyond] = 1;
    }"""
    y = np.zeros(1, np.int32)
    with pytest.raises(KernelError, match="shared memory is read that nobody wrote"):
        run_kernel(source, y, np.int32(0), block=(1, 1, 1), shared_bytes=16)
    written = source.replace("y[0] = fixed[0] + dynamic[0];", "")
    run_kernel(written, y, np.int32(0), block=(1, 1, 1), shared_bytes=16)
    with pytest.raises(KernelError, match="beyond the dynamic shared memory"):
        run_kernel(written, y, np.int32(4), block=(1, 1, 1), shared_bytes=16)


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
