"""What every kernel's source begins with: element types, how they are read and written, indices, NaN-keeping extremes.

Kernels are C++ for NVRTC. 16-bit floats are stored as such and computed in float: `get` widens, `put` rounds to nearest
even. Nothing is included, so that a kernel compiles in milliseconds and needs no header of the CUDA toolkit.
"""

from __future__ import annotations

from dagexec.core.dtypes import TypeMeta
from dagexec.errors import DeviceError

C_TYPES = {
    "float32": "float",
    "float64": "double",
    "float16": "half_t",
    "bfloat16": "bfloat_t",
    "int8": "signed char",
    "uint8": "unsigned char",
    "int16": "short",
    "uint16": "unsigned short",
    "int32": "int",
    "int64": "long long",
    "uint32": "unsigned int",
    "uint64": "unsigned long long",
    "bool": "bool",
}
"""The C type of an element in memory, by the name of its TypeMeta."""


def c_type(meta: TypeMeta) -> str:
    """The C type of the elements of a tensor of `meta`. Raises DeviceError for those that kernels do not know."""
    if meta.name not in C_TYPES:
        raise DeviceError(f"elements of type {meta} are not supported on CUDA; expected one of {', '.join(C_TYPES)}")
    return C_TYPES[meta.name]


PRELUDE = r"""
typedef long long i64;
typedef unsigned long long u64;
typedef unsigned int u32;
struct half_t { unsigned short bits; };
struct bfloat_t { unsigned short bits; };
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 700
#define BY_VALUE const __grid_constant__
#else
#define BY_VALUE const
#endif

__device__ inline u32 bits_of(float x) { return __float_as_uint(x); }
__device__ inline float float_of(u32 b) { return __uint_as_float(b); }

__device__ inline float widen(half_t h) {
    u32 sign = (u32)(h.bits & 0x8000u) << 16, exponent = (h.bits >> 10) & 31u, fraction = h.bits & 1023u;
    if (exponent == 31u) return float_of(sign | 0x7f800000u | (fraction << 13));
    if (exponent) return float_of(sign | ((exponent + 112u) << 23) | (fraction << 13));
    float x = (float)fraction * 5.9604644775390625e-8f;
    return float_of(sign | bits_of(x));
}
__device__ inline float widen(bfloat_t b) { return float_of((u32)b.bits << 16); }

__device__ inline half_t to_half(float x) {
    u32 b = bits_of(x), sign = (b >> 16) & 0x8000u, magnitude = b & 0x7fffffffu;
    half_t h;
    if (magnitude > 0x7f800000u) { h.bits = (unsigned short)(sign | 0x7e00u); return h; }
    if (magnitude >= 0x477ff000u) { h.bits = (unsigned short)(sign | 0x7c00u); return h; }
    if (magnitude < 0x38800000u) {
        u32 r = bits_of(float_of(magnitude) + 0.5f) - 0x3f000000u;
        h.bits = (unsigned short)(sign | r);
        return h;
    }
    u32 r = magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u);
    h.bits = (unsigned short)(sign | (r >> 13));
    return h;
}
__device__ inline bfloat_t to_bfloat(float x) {
    u32 b = bits_of(x);
    bfloat_t r;
    bool nan = (b & 0x7fffffffu) > 0x7f800000u;
    r.bits = (unsigned short)(nan ? (b >> 16) | 0x40u : (b + 0x7fffu + ((b >> 16) & 1u)) >> 16);
    return r;
}

template <class T> struct computed { typedef T type; };
template <> struct computed<half_t> { typedef float type; };
template <> struct computed<bfloat_t> { typedef float type; };

template <class T> __device__ inline T get(const T* p, i64 i) { return p[i]; }
__device__ inline float get(const half_t* p, i64 i) { return widen(p[i]); }
__device__ inline float get(const bfloat_t* p, i64 i) { return widen(p[i]); }
template <class T, class A> __device__ inline void put(T* p, i64 i, A x) { p[i] = (T)x; }
template <class A> __device__ inline void put(half_t* p, i64 i, A x) { p[i] = to_half((float)x); }
template <class A> __device__ inline void put(bfloat_t* p, i64 i, A x) { p[i] = to_bfloat((float)x); }

template <class A> __device__ inline bool is_nan(A x) { return x != x; }
template <class A> __device__ inline A nan_max(A a, A b) { return a > b || is_nan(a) ? a : b; }
template <class A> __device__ inline A nan_min(A a, A b) { return a < b || is_nan(a) ? a : b; }

__device__ inline i64 first_index() { return (i64)blockIdx.x * blockDim.x + threadIdx.x; }
__device__ inline i64 index_step() { return (i64)gridDim.x * blockDim.x; }
#define FOR_EACH(i, n) for (i64 i = first_index(), step_of_##i = index_step(); i < (n); i += step_of_##i)
"""
"""See the module's docstring. `FOR_EACH(i, n)` is the grid-stride loop over 0 to n - 1; `larger` and `smaller` keep a
NaN, as NumPy's `maximum` and `minimum` do; `computed<T>::type` is what an element of type T is computed in. A struct
that is passed by value and indexed in a loop is declared `BY_VALUE`: each thread may copy it to local memory if not."""
