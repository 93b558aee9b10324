// Sixteen float32 lanes under one set of names, for every instruction set.
//
// Included inside namespace cotrt::COTRT_ISA by isa_*.cpp, so that no inline function compiled
// with one file's flags can be linked into another's.

#if defined(COTRT_AVX512)
#include "simd_avx512.h"
#elif defined(COTRT_AVX2)
#include "simd_avx2.h"
#else
#include "simd_generic.h"
#endif

#if !defined(COTRT_AVX512)
// out[0, n): reduce_max (reduce_add) of each of n rows, 1 to 16.
inline void reduce_max_each(const F* rows, int n, float* out) {
  for (int m = 0; m < n; ++m) out[m] = reduce_max(rows[m]);
}
inline void reduce_add_each(const F* rows, int n, float* out) {
  for (int m = 0; m < n; ++m) out[m] = reduce_add(rows[m]);
}
#endif

// Adding it leaves the nearest integer in the low bits; |x| < 2^22.
constexpr float kShifter = 12582912.f;

// 2^x for x <= 127 to about 1e-7 relative (kFast: 3e-6), coarser below 2^-126; exactly 0 from
// -127 down, -inf included; a NaN stays one.
template <bool kFast = false>
inline F exp2(F x) {
  x = max(set1(-127.f), x);
  const F shifted = add(x, set1(kShifter));
  const F f = sub(x, sub(shifted, set1(kShifter)));  // within a half
  F p;
  if (kFast) {
    p = set1(9.58285e-3f);
    p = fma(p, f, set1(5.590644e-2f));
    p = fma(p, f, set1(2.4024099e-1f));
    p = fma(p, f, set1(6.9312419e-1f));
  } else {
    p = set1(1.5403530e-4f);
    p = fma(p, f, set1(1.3333558e-3f));
    p = fma(p, f, set1(9.6181291e-3f));
    p = fma(p, f, set1(5.5504109e-2f));
    p = fma(p, f, set1(2.4022651e-1f));
    p = fma(p, f, set1(6.9314718e-1f));
  }
  p = fma(p, f, set1(1.f));
  // x = -127 gives exactly 1 * 2^-127, whose bits are those of 0.
  return add_exponent(p, shifted);
}
constexpr float kLog2E = 1.4426950408889634f;

// x * sigmoid(x).
inline F silu(F x) {
  const F t = exp2(min(mul(x, set1(-kLog2E)), set1(126.f)));
  return div(x, add(set1(1.f), t));
}

#if defined(COTRT_EMULATED_PAIRS)
#include "emulated_pairs.h"
#endif

#include "element_types.h"
