"""C++ that the expressions of element-wise kernels are written in; integers wrap around, as NumPy's do."""

from __future__ import annotations

FORMULAS = r"""
__device__ inline float plus(float a, float b) { return a + b; }
__device__ inline double plus(double a, double b) { return a + b; }
__device__ inline int plus(int a, int b) { return (int)((u32)a + (u32)b); }
__device__ inline i64 plus(i64 a, i64 b) { return (i64)((u64)a + (u64)b); }
__device__ inline u32 plus(u32 a, u32 b) { return a + b; }
__device__ inline u64 plus(u64 a, u64 b) { return a + b; }
__device__ inline float minus(float a, float b) { return a - b; }
__device__ inline double minus(double a, double b) { return a - b; }
__device__ inline int minus(int a, int b) { return (int)((u32)a - (u32)b); }
__device__ inline i64 minus(i64 a, i64 b) { return (i64)((u64)a - (u64)b); }
__device__ inline u32 minus(u32 a, u32 b) { return a - b; }
__device__ inline u64 minus(u64 a, u64 b) { return a - b; }
__device__ inline float times(float a, float b) { return a * b; }
__device__ inline double times(double a, double b) { return a * b; }
__device__ inline int times(int a, int b) { return (int)((u32)a * (u32)b); }
__device__ inline i64 times(i64 a, i64 b) { return (i64)((u64)a * (u64)b); }
__device__ inline u32 times(u32 a, u32 b) { return a * b; }
__device__ inline u64 times(u64 a, u64 b) { return a * b; }
__device__ inline float quotient(float a, float b) { return a / b; }
__device__ inline double quotient(double a, double b) { return a / b; }
__device__ inline int quotient(int a, int b) { return b == 0 ? 0 : b == -1 ? minus(0, a) : a / b; }
__device__ inline i64 quotient(i64 a, i64 b) { return b == 0 ? 0 : b == -1 ? minus((i64)0, a) : a / b; }
__device__ inline u32 quotient(u32 a, u32 b) { return b == 0 ? 0 : a / b; }
__device__ inline u64 quotient(u64 a, u64 b) { return b == 0 ? 0 : a / b; }
__device__ inline float negated(float a) { return -a; }
__device__ inline double negated(double a) { return -a; }
__device__ inline int negated(int a) { return minus(0, a); }
__device__ inline i64 negated(i64 a) { return minus((i64)0, a); }
__device__ inline float magnitude(float a) { return fabsf(a); }
__device__ inline double magnitude(double a) { return fabs(a); }
__device__ inline int magnitude(int a) { return a < 0 ? negated(a) : a; }
__device__ inline i64 magnitude(i64 a) { return a < 0 ? negated(a) : a; }
template <class A> __device__ inline A sign_of(A a) { return is_nan(a) ? a : (A)((a > A(0)) - (a < A(0))); }
template <class T, class V> __device__ inline T stored(const T*, V v) { return (T)v; }
template <class V> __device__ inline float stored(const half_t*, V v) { return widen(to_half((float)v)); }
template <class V> __device__ inline float stored(const bfloat_t*, V v) { return widen(to_bfloat((float)v)); }

__device__ inline bool complement(bool a) { return !a; }
template <class I> __device__ inline I complement(I a) { return ~a; }

template <class A> __device__ inline A clipped(A x, A low, A high) { return nan_min(nan_max(x, low), high); }
template <class A> __device__ inline A logistic(A x) { return A(1) / (A(1) + exp(-x)); }
template <class A> __device__ inline A softplus(A x) { return nan_max(x, A(0)) + log1p(exp(-fabs(x))); }
"""
