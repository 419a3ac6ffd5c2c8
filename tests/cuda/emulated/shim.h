// CUDA's C++ as g++ sees it: a kernel is a function that is called once for each thread of each block.
#pragma once
#define __global__
#define __device__
#define __host__
#define __restrict__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __noinline__ __attribute__((noinline))
#define __align__(n) __attribute__((aligned(n)))
#define __constant__ static const
#define __shared__ static thread_local
#define NULL 0
#define NULL 0

struct dim3_t { unsigned int x, y, z; };
typedef unsigned long size_t;
extern "C" {
extern __attribute__((tls_model("initial-exec"))) thread_local dim3_t threadIdx, blockIdx, blockDim, gridDim;
void emulated_syncthreads(int);
void emulated_syncwarp(unsigned, int);
unsigned long long* emulated_slots();
unsigned emulated_thread();
unsigned emulated_threads();
void* emulated_dynamic_shared();
void emulated_atomic(const void*, unsigned);
}
const int warpSize = 32;

extern "C" {
float expf(float) noexcept; float logf(float) noexcept; float log1pf(float) noexcept; float expm1f(float) noexcept;
float sqrtf(float) noexcept; float cbrtf(float) noexcept; float powf(float, float) noexcept; float tanhf(float) noexcept;
float sinf(float) noexcept; float cosf(float) noexcept; float tanf(float) noexcept; float asinf(float) noexcept;
float acosf(float) noexcept; float atanf(float) noexcept; float sinhf(float) noexcept; float coshf(float) noexcept;
float erff(float) noexcept; float floorf(float) noexcept; float ceilf(float) noexcept; float rintf(float) noexcept;
float fabsf(float) noexcept; float fmaf(float, float, float) noexcept; float truncf(float) noexcept;
float fmodf(float, float) noexcept; float copysignf(float, float) noexcept; float exp2f(float) noexcept;
float log2f(float) noexcept; float log10f(float) noexcept; float roundf(float) noexcept; float hypotf(float, float) noexcept;
float erfcf(float) noexcept; float asinhf(float) noexcept; float acoshf(float) noexcept; float atanhf(float) noexcept;
float atan2f(float, float) noexcept; float fminf(float, float) noexcept; float fmaxf(float, float) noexcept;
float lgammaf(float) noexcept; float tgammaf(float) noexcept; float nearbyintf(float) noexcept;
float ldexpf(float, int) noexcept; float scalbnf(float, int) noexcept; float frexpf(float, int*) noexcept;
float exp10f(float) noexcept; float fdimf(float, float) noexcept; float nextafterf(float, float) noexcept;
float remainderf(float, float) noexcept; float modff(float, float*) noexcept; long lrintf(float) noexcept;
double exp(double) noexcept; double log(double) noexcept; double log1p(double) noexcept; double expm1(double) noexcept;
double sqrt(double) noexcept; double cbrt(double) noexcept; double pow(double, double) noexcept;
double tanh(double) noexcept; double sin(double) noexcept; double cos(double) noexcept; double tan(double) noexcept;
double asin(double) noexcept; double acos(double) noexcept; double atan(double) noexcept; double sinh(double) noexcept;
double cosh(double) noexcept; double erf(double) noexcept; double floor(double) noexcept; double ceil(double) noexcept;
double rint(double) noexcept; double fabs(double) noexcept; double fma(double, double, double) noexcept;
double trunc(double) noexcept; double fmod(double, double) noexcept; double copysign(double, double) noexcept;
double exp2(double) noexcept; double log2(double) noexcept; double log10(double) noexcept; double round(double) noexcept;
double hypot(double, double) noexcept; double erfc(double) noexcept; double asinh(double) noexcept;
double acosh(double) noexcept; double atanh(double) noexcept; double atan2(double, double) noexcept;
double fmin(double, double) noexcept; double fmax(double, double) noexcept; double lgamma(double) noexcept;
double tgamma(double) noexcept; double nearbyint(double) noexcept; double ldexp(double, int) noexcept;
double scalbn(double, int) noexcept; double frexp(double, int*) noexcept; double exp10(double) noexcept;
double fdim(double, double) noexcept; double nextafter(double, double) noexcept; double remainder(double, double) noexcept;
double modf(double, double*) noexcept; long lrint(double) noexcept;
int abs(int) noexcept; long labs(long) noexcept; long long llabs(long long) noexcept;
}
// CUDA has C++ overloads of the mathematical functions.
inline float exp(float x) { return expf(x); }
inline float log(float x) { return logf(x); }
inline float log1p(float x) { return log1pf(x); }
inline float expm1(float x) { return expm1f(x); }
inline float sqrt(float x) { return sqrtf(x); }
inline float cbrt(float x) { return cbrtf(x); }
inline float pow(float x, float y) { return powf(x, y); }
inline float tanh(float x) { return tanhf(x); }
inline float sin(float x) { return sinf(x); }
inline float cos(float x) { return cosf(x); }
inline float tan(float x) { return tanf(x); }
inline float asin(float x) { return asinf(x); }
inline float acos(float x) { return acosf(x); }
inline float atan(float x) { return atanf(x); }
inline float sinh(float x) { return sinhf(x); }
inline float cosh(float x) { return coshf(x); }
inline float erf(float x) { return erff(x); }
inline float floor(float x) { return floorf(x); }
inline float ceil(float x) { return ceilf(x); }
inline float rint(float x) { return rintf(x); }
inline float fabs(float x) { return fabsf(x); }
inline float fma(float x, float y, float z) { return fmaf(x, y, z); }
inline float trunc(float x) { return truncf(x); }
inline float fmod(float x, float y) { return fmodf(x, y); }
inline float copysign(float x, float y) { return copysignf(x, y); }
inline float exp2(float x) { return exp2f(x); }
inline float log2(float x) { return log2f(x); }
inline float log10(float x) { return log10f(x); }
inline float round(float x) { return roundf(x); }
inline float hypot(float x, float y) { return hypotf(x, y); }
inline float erfc(float x) { return erfcf(x); }
inline float asinh(float x) { return asinhf(x); }
inline float acosh(float x) { return acoshf(x); }
inline float atanh(float x) { return atanhf(x); }
inline float atan2(float x, float y) { return atan2f(x, y); }
inline float fmin(float x, float y) { return fminf(x, y); }
inline float fmax(float x, float y) { return fmaxf(x, y); }
inline float lgamma(float x) { return lgammaf(x); }
inline float tgamma(float x) { return tgammaf(x); }
inline float nearbyint(float x) { return nearbyintf(x); }
inline float ldexp(float x, int e) { return ldexpf(x, e); }
inline float exp10(float x) { return exp10f(x); }
inline float remainder(float x, float y) { return remainderf(x, y); }
inline float nextafter(float x, float y) { return nextafterf(x, y); }
inline float abs(float x) { return fabsf(x); }
inline double abs(double x) { return fabs(x); }
inline long abs(long x) { return labs(x); }
inline long long abs(long long x) { return llabs(x); }
inline bool isnan(float x) { return x != x; }
inline bool isnan(double x) { return x != x; }
inline bool isinf(float x) { return __builtin_isinf(x); }
inline bool isinf(double x) { return __builtin_isinf(x); }
inline bool isfinite(float x) { return __builtin_isfinite(x); }
inline bool isfinite(double x) { return __builtin_isfinite(x); }
inline bool signbit(float x) { return __builtin_signbit(x); }
inline bool signbit(double x) { return __builtin_signbit(x); }
#define EXTREMES(T) inline T min(T a, T b) { return b < a ? b : a; } inline T max(T a, T b) { return a < b ? b : a; }
EXTREMES(int) EXTREMES(unsigned int) EXTREMES(long) EXTREMES(unsigned long) EXTREMES(long long)
EXTREMES(unsigned long long)
inline float min(float a, float b) { return fminf(a, b); }
inline float max(float a, float b) { return fmaxf(a, b); }
inline double min(double a, double b) { return fmin(a, b); }
inline double max(double a, double b) { return fmax(a, b); }
inline float __expf(float x) { return expf(x); }
inline float __logf(float x) { return logf(x); }
inline float __powf(float x, float y) { return powf(x, y); }
inline float __fdividef(float x, float y) { return x / y; }
inline float __saturatef(float x) { return x > 0.0f ? (x < 1.0f ? x : 1.0f) : 0.0f; }
#define ROUNDED(T, p) \
    inline T __##p##add_rn(T x, T y) { return x + y; } inline T __##p##sub_rn(T x, T y) { return x - y; } \
    inline T __##p##mul_rn(T x, T y) { return x * y; } inline T __##p##div_rn(T x, T y) { return x / y; }
ROUNDED(float, f) ROUNDED(double, d)
inline float __fmaf_rn(float x, float y, float z) { return fmaf(x, y, z); }
inline float __fsqrt_rn(float x) { return sqrtf(x); }
inline double __dsqrt_rn(double x) { return sqrt(x); }
inline double __fma_rn(double x, double y, double z) { return fma(x, y, z); }
inline int __float2int_rn(float x) { return (int)lrintf(x); }
inline int __float2int_rz(float x) { return (int)x; }
inline int __float2int_rd(float x) { return (int)floorf(x); }
inline int __double2int_rn(double x) { return (int)lrint(x); }
inline long long __float2ll_rn(float x) { return lrintf(x); }
inline long long __double2ll_rn(double x) { return lrint(x); }
inline float __int2float_rn(int x) { return (float)x; }
inline float __ll2float_rn(long long x) { return (float)x; }
inline float __double2float_rn(double x) { return (float)x; }
inline float rsqrt(float x) { return 1.0f / sqrtf(x); }
inline double rsqrt(double x) { return 1.0 / sqrt(x); }
inline float rsqrtf(float x) { return rsqrt(x); }
inline unsigned int __float_as_uint(float x) { unsigned int b; __builtin_memcpy(&b, &x, 4); return b; }
inline float __uint_as_float(unsigned int b) { float x; __builtin_memcpy(&x, &b, 4); return x; }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return (unsigned long long)(((unsigned __int128)a * b) >> 64);
}
inline unsigned int __umulhi(unsigned int a, unsigned int b) { return (unsigned int)(((unsigned long long)a * b) >> 32); }
inline long long __mul64hi(long long a, long long b) { return (long long)(((__int128)a * b) >> 64); }
inline int __mulhi(int a, int b) { return (int)(((long long)a * b) >> 32); }
template <class To, class From> inline To same_bits(From x) {
    static_assert(sizeof(To) == sizeof(From), "sizes");
    To y;
    __builtin_memcpy(&y, &x, sizeof y);
    return y;
}
inline int __float_as_int(float x) { return same_bits<int>(x); }
inline float __int_as_float(int x) { return same_bits<float>(x); }
inline long long __double_as_longlong(double x) { return same_bits<long long>(x); }
inline double __longlong_as_double(long long x) { return same_bits<double>(x); }
inline int __popc(unsigned int x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __clz(int x) { return x ? __builtin_clz((unsigned)x) : 32; }
inline int __clzll(long long x) { return x ? __builtin_clzll((unsigned long long)x) : 64; }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline unsigned int __brev(unsigned int x) {
    unsigned int y = 0;
    for (int i = 0; i < 32; ++i) y |= (x >> i & 1u) << (31 - i);
    return y;
}
inline unsigned int __funnelshift_l(unsigned int low, unsigned int high, unsigned int n) {
    return (unsigned int)((((unsigned long long)high << 32 | low) << (n & 31u)) >> 32);
}
inline unsigned int __byte_perm(unsigned int x, unsigned int y, unsigned int s) {
    unsigned long long both = (unsigned long long)y << 32 | x;
    unsigned int r = 0;
    for (int i = 0; i < 4; ++i) r |= (unsigned int)(both >> (s >> (4 * i) & 7u) * 8 & 255u) << (8 * i);
    return r;
}
template <class T> inline T __ldg(const T* p) { return *p; }
template <class T> inline T __ldcs(const T* p) { return *p; }
template <class T> inline void __stcs(T* p, T x) { *p = x; }

#define VECTORS(T, name) \
    struct name##2 { T x, y; } __attribute__((aligned(2 * sizeof(T)))); \
    struct name##3 { T x, y, z; }; \
    struct name##4 { T x, y, z, w; } __attribute__((aligned(sizeof(T) < 4 ? 4 * sizeof(T) : 16))); \
    inline name##2 make_##name##2(T x, T y) { return {x, y}; } \
    inline name##3 make_##name##3(T x, T y, T z) { return {x, y, z}; } \
    inline name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }
VECTORS(signed char, char) VECTORS(unsigned char, uchar) VECTORS(short, short) VECTORS(unsigned short, ushort)
VECTORS(int, int) VECTORS(unsigned int, uint) VECTORS(float, float) VECTORS(long long, longlong)
VECTORS(unsigned long long, ulonglong) VECTORS(double, double)

// Barriers, and operations of a warp.
#define UNWATCHED __attribute__((no_sanitize("thread"), noinline)) static
#define __syncthreads() emulated_syncthreads(__LINE__)
#define __syncwarp(...) emulated_syncwarp(mask_of(__VA_ARGS__), __LINE__)
#define __threadfence() __atomic_thread_fence(__ATOMIC_SEQ_CST)
#define __threadfence_block() __atomic_thread_fence(__ATOMIC_SEQ_CST)
inline unsigned mask_of(unsigned mask = 0xffffffffu) { return mask; }
template <class T> UNWATCHED T exchanged(unsigned mask, T value, int from, int line) {
    static_assert(sizeof(T) <= 8, "a shuffle moves at most 8 bytes");
    unsigned long long* slots = emulated_slots();
    unsigned lane = emulated_thread() % 32;
    __builtin_memcpy(&slots[lane], &value, sizeof value);
    emulated_syncwarp(mask, line);
    T found;
    __builtin_memcpy(&found, &slots[from], sizeof found);
    return found;
}
template <class T> inline T shuffled_xor(int line, unsigned mask, T value, int lanes, int width = 32) {
    int lane = emulated_thread() % 32, from = lane ^ lanes;
    return exchanged(mask, value, from / width > lane / width ? lane : from, line);
}
template <class T> inline T shuffled_down(int line, unsigned mask, T value, unsigned delta, int width = 32) {
    int lane = emulated_thread() % 32, from = lane + delta;
    return exchanged(mask, value, from / width > lane / width ? lane : from, line);
}
template <class T> inline T shuffled_up(int line, unsigned mask, T value, unsigned delta, int width = 32) {
    int lane = emulated_thread() % 32;
    return exchanged(mask, value, lane % width < (int)delta ? lane : lane - (int)delta, line);
}
template <class T> inline T shuffled(int line, unsigned mask, T value, int lane, int width = 32) {
    int own = emulated_thread() % 32;
    return exchanged(mask, value, own / width * width + (lane & (width - 1)), line);
}
#define __shfl_xor_sync(...) shuffled_xor(__LINE__, __VA_ARGS__)
#define __shfl_down_sync(...) shuffled_down(__LINE__, __VA_ARGS__)
#define __shfl_up_sync(...) shuffled_up(__LINE__, __VA_ARGS__)
#define __shfl_sync(...) shuffled(__LINE__, __VA_ARGS__)
UNWATCHED unsigned ballot(int line, unsigned mask, int predicate) {
    unsigned long long* slots = emulated_slots();
    unsigned thread = emulated_thread(), found = 0;
    slots[thread % 32] = predicate != 0;
    emulated_syncwarp(mask, line);
    for (unsigned i = 0; i < 32; ++i)
        if ((mask >> i & 1) && thread / 32 * 32 + i < emulated_threads() && slots[i]) found |= 1u << i;
    return found;
}
#define __ballot_sync(mask, predicate) ballot(__LINE__, mask, predicate)
#define __any_sync(mask, predicate) (ballot(__LINE__, mask, predicate) != 0)
#define __all_sync(mask, predicate) (ballot(__LINE__, mask, !(predicate)) == 0)
#define __syncthreads_or(predicate) block_any(__LINE__, predicate)
#define __syncthreads_and(predicate) (!block_any(__LINE__, !(predicate)))
UNWATCHED int block_any(int line, int predicate) {
    static thread_local int found;
    emulated_syncthreads(line);
    found = 0;
    emulated_syncthreads(line);
    if (predicate) found = 1;
    emulated_syncthreads(line);
    return found;
}

// Atomics of integers. There are none of floats: sums in no certain order have no certain bytes.
#define ATOMICS(T) \
    UNWATCHED T atomicAdd(T* p, T x) { emulated_atomic(p, sizeof *p); return __atomic_fetch_add(p, x, __ATOMIC_SEQ_CST); } \
    UNWATCHED T atomicExch(T* p, T x) { emulated_atomic(p, sizeof *p); return __atomic_exchange_n(p, x, __ATOMIC_SEQ_CST); } \
    UNWATCHED T atomicAnd(T* p, T x) { emulated_atomic(p, sizeof *p); return __atomic_fetch_and(p, x, __ATOMIC_SEQ_CST); } \
    UNWATCHED T atomicOr(T* p, T x) { emulated_atomic(p, sizeof *p); return __atomic_fetch_or(p, x, __ATOMIC_SEQ_CST); } \
    UNWATCHED T atomicXor(T* p, T x) { emulated_atomic(p, sizeof *p); return __atomic_fetch_xor(p, x, __ATOMIC_SEQ_CST); } \
    UNWATCHED T atomicCAS(T* p, T expected, T x) { emulated_atomic(p, sizeof *p); \
        __atomic_compare_exchange_n(p, &expected, x, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST); \
        return expected; \
    } \
    UNWATCHED T atomicMax(T* p, T x) { emulated_atomic(p, sizeof *p); \
        T held = *p; \
        while (held < x && !__atomic_compare_exchange_n(p, &held, x, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {} \
        return held; \
    } \
    UNWATCHED T atomicMin(T* p, T x) { emulated_atomic(p, sizeof *p); \
        T held = *p; \
        while (x < held && !__atomic_compare_exchange_n(p, &held, x, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {} \
        return held; \
    }
ATOMICS(int) ATOMICS(unsigned int) ATOMICS(unsigned long long)
UNWATCHED int atomicSub(int* p, int x) { emulated_atomic(p, sizeof *p); return __atomic_fetch_sub(p, x, __ATOMIC_SEQ_CST); }
UNWATCHED unsigned int atomicSub(unsigned int* p, unsigned int x) { emulated_atomic(p, sizeof *p); return __atomic_fetch_sub(p, x, __ATOMIC_SEQ_CST); }
UNWATCHED unsigned int atomicInc(unsigned int* p, unsigned int most) { emulated_atomic(p, sizeof *p);
    unsigned int held = *p;
    while (!__atomic_compare_exchange_n(p, &held, held >= most ? 0 : held + 1, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {}
    return held;
}

// How a kernel is called: `parameters` point to its arguments, as for cuLaunchKernel.
template <unsigned long... I> struct places {};
template <unsigned long N, unsigned long... I> struct places_up_to : places_up_to<N - 1, N - 1, I...> {};
template <unsigned long... I> struct places_up_to<0, I...> { typedef places<I...> type; };
template <class T> struct plain { typedef T type; };
template <class T> struct plain<const T> { typedef T type; };

template <class... A, unsigned long... I>
UNWATCHED void call_kernel(void (*kernel)(A...), void** parameters, places<I...>) {
    kernel(*(typename plain<A>::type*)parameters[I]...);
}
template <class... A> UNWATCHED void call_kernel(void (*kernel)(A...), void** parameters) {
    call_kernel(kernel, parameters, typename places_up_to<sizeof...(A)>::type());
}
// What a parameter is: a value, a pointer that is only read through, a pointer that may be written through.
template <class T> struct kind_of { enum { value = 0 }; };
template <class T> struct kind_of<const T*> { enum { value = 1 }; };
template <class T> struct kind_of<T*> { enum { value = 2 }; };
template <class... A> UNWATCHED int describe_parameters(void (*)(A...), int* sizes, int* kinds) {
    int found[] = {(int)sizeof(A)..., 0}, sorts[] = {kind_of<typename plain<A>::type>::value..., 0};
    for (unsigned long i = 0; i < sizeof...(A); ++i) { sizes[i] = found[i]; kinds[i] = sorts[i]; }
    return (int)sizeof...(A);
}
