// CUDA's C++ as g++ sees it: a kernel is a function that is called once for each thread of each block.
#pragma once
#define __global__
#define __device__
#define __host__
#define __restrict__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __constant__ static const

struct dim3_t { unsigned int x, y, z; };
extern "C" { extern thread_local dim3_t threadIdx, blockIdx, blockDim, gridDim; }

extern "C" {
float expf(float) noexcept; float logf(float) noexcept; float log1pf(float) noexcept; float expm1f(float) noexcept;
float sqrtf(float) noexcept; float cbrtf(float) noexcept; float powf(float, float) noexcept; float tanhf(float) noexcept;
float sinf(float) noexcept; float cosf(float) noexcept; float tanf(float) noexcept; float asinf(float) noexcept;
float acosf(float) noexcept; float atanf(float) noexcept; float sinhf(float) noexcept; float coshf(float) noexcept;
float erff(float) noexcept; float floorf(float) noexcept; float ceilf(float) noexcept; float rintf(float) noexcept;
float fabsf(float) noexcept; float fmaf(float, float, float) noexcept; float truncf(float) noexcept;
float fmodf(float, float) noexcept; float copysignf(float, float) noexcept; float exp2f(float) noexcept;
float log2f(float) noexcept;
double exp(double) noexcept; double log(double) noexcept; double log1p(double) noexcept; double expm1(double) noexcept;
double sqrt(double) noexcept; double cbrt(double) noexcept; double pow(double, double) noexcept;
double tanh(double) noexcept; double sin(double) noexcept; double cos(double) noexcept; double tan(double) noexcept;
double asin(double) noexcept; double acos(double) noexcept; double atan(double) noexcept; double sinh(double) noexcept;
double cosh(double) noexcept; double erf(double) noexcept; double floor(double) noexcept; double ceil(double) noexcept;
double rint(double) noexcept; double fabs(double) noexcept; double fma(double, double, double) noexcept;
double trunc(double) noexcept; double fmod(double, double) noexcept; double copysign(double, double) noexcept;
double exp2(double) noexcept; double log2(double) noexcept;
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
inline float rsqrt(float x) { return 1.0f / sqrtf(x); }
inline double rsqrt(double x) { return 1.0 / sqrt(x); }
inline float rsqrtf(float x) { return rsqrt(x); }
inline unsigned int __float_as_uint(float x) { unsigned int b; __builtin_memcpy(&b, &x, 4); return b; }
inline float __uint_as_float(unsigned int b) { float x; __builtin_memcpy(&x, &b, 4); return x; }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return (unsigned long long)(((unsigned __int128)a * b) >> 64);
}
inline unsigned int __umulhi(unsigned int a, unsigned int b) { return (unsigned int)(((unsigned long long)a * b) >> 32); }

// How a kernel is called: `parameters` point to its arguments, as for cuLaunchKernel.
template <unsigned long... I> struct places {};
template <unsigned long N, unsigned long... I> struct places_up_to : places_up_to<N - 1, N - 1, I...> {};
template <unsigned long... I> struct places_up_to<0, I...> { typedef places<I...> type; };
template <class T> struct plain { typedef T type; };
template <class T> struct plain<const T> { typedef T type; };

template <class... A, unsigned long... I>
inline void call_kernel(void (*kernel)(A...), void** parameters, places<I...>) {
    kernel(*(typename plain<A>::type*)parameters[I]...);
}
template <class... A> inline void call_kernel(void (*kernel)(A...), void** parameters) {
    call_kernel(kernel, parameters, typename places_up_to<sizeof...(A)>::type());
}
template <class... A> inline int parameter_sizes(void (*)(A...), int* sizes) {
    int found[] = {(int)sizeof(A)..., 0};
    for (unsigned long i = 0; i < sizeof...(A); ++i) sizes[i] = found[i];
    return (int)sizeof...(A);
}
