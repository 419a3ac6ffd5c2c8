"""C++ that the expressions of element-wise kernels are written in: formulas of activations, integer arithmetic.

Formulas are templates over float and double and hold what `dagexec.ops.families.activation.passes` holds: they do not
overflow, keep NaN, and have the limits of the CPU operators at infinity. Integers wrap around, as NumPy's.
"""

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

__device__ inline float logistic_floor(float) { return -88.0f; }
__device__ inline double logistic_floor(double) { return -700.0; }
template <class A> __device__ inline A logistic(A x) { return A(1) / (A(1) + exp(-nan_max(x, logistic_floor(x)))); }
template <class A> __device__ inline A swish(A x, A alpha) {
    if (alpha == A(0)) return x * A(0.5);
    A floor = logistic_floor(x) / alpha, kept = alpha > A(0) ? nan_max(x, floor) : nan_min(x, floor);
    return kept / (A(1) + exp(-alpha * kept));
}
template <class A> __device__ inline A softplus(A x) { return nan_max(x, A(0)) + log1p(exp(-fabs(x))); }
template <class A> __device__ inline A clipped(A x, A low, A high) { return nan_min(nan_max(x, low), high); }
template <class A> __device__ inline A hard_sigmoid(A x, A alpha, A beta) {
    return clipped(alpha * x + beta, A(0), A(1));
}
template <class A> __device__ inline A hard_swish(A x) { return x * hard_sigmoid(x, A(1.0 / 6), A(0.5)); }
template <class A> __device__ inline A elu(A x, A alpha) { return x > A(0) ? x : alpha * expm1(x); }
template <class A> __device__ inline A leaky_relu(A x, A alpha) { return x > A(0) ? x : alpha * x; }
template <class A> __device__ inline A mish(A x) { return x * tanh(softplus(x)); }
template <class A> __device__ inline A gelu_erf(A x) {
    const A root = A(0.70710678118654752440);
    A m = nan_min(fabs(x) * root, A(6));
    return nan_max(x, A(0)) - root * m * erfc(m);
}
__device__ inline float gelu_floor(float) { return -8.5f; }
__device__ inline double gelu_floor(double) { return -12.0; }
template <class A> __device__ inline A gelu_tanh(A x) {
    const A slope = A(1.59576912160573071176), floor = gelu_floor(x);
    A kept = nan_max(x, floor), near = nan_min(kept, -floor);
    return kept / (A(1) + exp(-kept * (slope + slope * A(0.044715) * near * near)));
}
template <class A> __device__ inline A swish_slope(A x) {
    A kept = clipped(x, logistic_floor(x), -logistic_floor(x)), s = logistic(kept);
    return (A(1) + kept * (A(1) - s)) * s;
}
template <class A> __device__ inline A mish_slope(A x) {
    A kept = clipped(x, logistic_floor(x), -logistic_floor(x)), gate = tanh(softplus(kept));
    return gate + kept * logistic(kept) * (A(1) - gate * gate);
}
__device__ inline float gelu_reach(float) { return 15.0f; }
__device__ inline double gelu_reach(double) { return 40.0; }
template <class A> __device__ inline A gelu_erf_slope(A x) {
    A kept = clipped(x, -gelu_reach(x), gelu_reach(x));
    A chance = A(0.5) * (A(1) + erf(kept * A(0.70710678118654752440)));
    return chance + kept * exp(A(-0.5) * kept * kept) * A(0.39894228040143267794);
}
template <class A> __device__ inline A gelu_tanh_slope(A x) {
    const A slope = A(1.59576912160573071176);
    A kept = clipped(x, gelu_floor(x), -gelu_floor(x)), square = kept * kept;
    A s = A(1) / (A(1) + exp(-kept * (slope + slope * A(0.044715) * square)));
    return s * (A(1) + (A(1) - s) * kept * (slope + slope * A(3 * 0.044715) * square));
}
"""
"""`slope` of gelu_tanh is 2 sqrt(2 / pi): 0.5 x (1 + tanh(u)) is x / (1 + exp(-2 u))."""
