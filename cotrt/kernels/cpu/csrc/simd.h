// Sixteen float32 lanes under one set of names, for every instruction set.
//
// Included inside namespace cotrt::COTRT_ISA by isa_*.cpp, so that no inline function compiled
// with one file's flags can be linked into another's.

// ---------------------------------------------------------------------------------------------
#if defined(COTRT_AVX512)

struct F {
  __m512 v;
};
inline F load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline void store(float* p, F a) { _mm512_storeu_ps(p, a.v); }
inline F set1(float x) { return {_mm512_set1_ps(x)}; }
inline F zero() { return {_mm512_setzero_ps()}; }
inline F fma(F a, F b, F c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline F fms(F a, F b, F c) { return {_mm512_fmsub_ps(a.v, b.v, c.v)}; }
inline F add(F a, F b) { return {_mm512_add_ps(a.v, b.v)}; }
inline F sub(F a, F b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline F mul(F a, F b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline F div(F a, F b) { return {_mm512_div_ps(a.v, b.v)}; }
// Where either is a NaN the result is b.
inline F max(F a, F b) { return {_mm512_max_ps(a.v, b.v)}; }
inline F min(F a, F b) { return {_mm512_min_ps(a.v, b.v)}; }
inline float reduce_add(F a) { return _mm512_reduce_add_ps(a.v); }
inline float reduce_max(F a) { return _mm512_reduce_max_ps(a.v); }
// a * 2^n by the exponent's bits; `shifted` is n + kShifter, so that n lies in its low bits.
inline F add_exponent(F a, F shifted) {
  return {_mm512_castsi512_ps(_mm512_add_epi32(
      _mm512_castps_si512(a.v), _mm512_slli_epi32(_mm512_castps_si512(shifted.v), 23)))};
}
// a where a >= t, else 0 (a NaN too).
inline F keep_at_least(F a, F t) {
  return {_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(a.v, t.v, _CMP_GE_OQ), a.v)};
}
// Lanes below n from a, the others from b.
inline F first_lanes(F a, int n, F b) {
  return {_mm512_mask_blend_ps(__mmask16((1u << n) - 1), b.v, a.v)};
}
inline F load_bf16(const bf16* p) {
  return {_mm512_castsi512_ps(
      _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16))};
}
inline void store_bf16(bf16* p, F a) {
  _mm256_storeu_si256((__m256i*)p, (__m256i)_mm512_cvtneps_pbh(a.v));
}

using Step = __m512i;  // 16 lanes of k steps
inline Step load_steps(const char* p) { return _mm512_loadu_si512(p); }
inline Step broadcast_step(const char* p) {
  int32_t x;
  memcpy(&x, p, 4);
  return _mm512_set1_epi32(x);
}
// 16 even and 16 odd int8 weights as bf16 pairs; every int8 is exact in bf16.
inline Step load_int8_steps(const char* p) {
  const __m512 even = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
  const __m512 odd =
      _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)(p + 16))));
  return _mm512_mask_mov_epi16(_mm512_castps_si512(odd), 0x55555555u,
                               _mm512_srli_epi32(_mm512_castps_si512(even), 16));
}
inline F dot_bf16(F acc, Step w, Step x) {
  return {_mm512_dpbf16_ps(acc.v, (__m512bh)w, (__m512bh)x)};
}
inline F dot_f32(F acc, Step w, Step x) {
  return {_mm512_fmadd_ps(_mm512_castsi512_ps(w), _mm512_castsi512_ps(x), acc.v)};
}
// A tile in registers: at most so many rows by so many lane groups, or, where rows are few.
constexpr int kTileRows = 12, kTileGroups = 2;
constexpr int kWideTileRows = 6, kWideTileGroups = 4;
constexpr int kProductsPerNs = 150;
// Few accumulators would wait for each other: the steps are split over copies of them.
constexpr int tile_copies(int rows, int groups) {
  return rows * groups <= 2 ? 4 : rows * groups <= 6 ? 2 : 1;
}

// ---------------------------------------------------------------------------------------------
#elif defined(COTRT_AVX2)

struct F {
  __m256 a, b;
};
inline F load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(float* p, F x) {
  _mm256_storeu_ps(p, x.a);
  _mm256_storeu_ps(p + 8, x.b);
}
inline F set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline F zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline F fma(F x, F y, F z) {
  return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
inline F fms(F x, F y, F z) {
  return {_mm256_fmsub_ps(x.a, y.a, z.a), _mm256_fmsub_ps(x.b, y.b, z.b)};
}
inline F add(F x, F y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
inline F sub(F x, F y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
inline F mul(F x, F y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
inline F div(F x, F y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
inline F max(F x, F y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
inline F min(F x, F y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
inline float reduce_add(F x) {
  const __m256 s = _mm256_add_ps(x.a, x.b);
  __m128 t = _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
  t = _mm_add_ps(t, _mm_movehl_ps(t, t));
  return _mm_cvtss_f32(_mm_add_ss(t, _mm_shuffle_ps(t, t, 1)));
}
inline float reduce_max(F x) {
  const __m256 s = _mm256_max_ps(x.a, x.b);
  __m128 t = _mm_max_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
  t = _mm_max_ps(t, _mm_movehl_ps(t, t));
  return _mm_cvtss_f32(_mm_max_ss(t, _mm_shuffle_ps(t, t, 1)));
}
inline __m256 add_exponent(__m256 x, __m256 shifted) {
  return _mm256_castsi256_ps(_mm256_add_epi32(
      _mm256_castps_si256(x), _mm256_slli_epi32(_mm256_castps_si256(shifted), 23)));
}
inline F add_exponent(F x, F shifted) {
  return {add_exponent(x.a, shifted.a), add_exponent(x.b, shifted.b)};
}
inline F keep_at_least(F x, F t) {
  return {_mm256_and_ps(_mm256_cmp_ps(x.a, t.a, _CMP_GE_OQ), x.a),
          _mm256_and_ps(_mm256_cmp_ps(x.b, t.b, _CMP_GE_OQ), x.b)};
}
inline F first_lanes(F x, int n, F y) {
  const __m256i i = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const __m256 a = _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(n), i));
  const __m256 b = _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(n - 8), i));
  return {_mm256_blendv_ps(y.a, x.a, a), _mm256_blendv_ps(y.b, x.b, b)};
}
inline __m256 widen_bf16(__m128i x) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16));
}
inline F load_bf16(const bf16* p) {
  return {widen_bf16(_mm_loadu_si128((const __m128i*)p)),
          widen_bf16(_mm_loadu_si128((const __m128i*)(p + 8)))};
}
// Round to nearest even; a NaN stays one.
inline __m256i round_bf16(__m256 x) {
  const __m256i u = _mm256_castps_si256(x);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
  const __m256i r = _mm256_srli_epi32(
      _mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  return _mm256_blendv_epi8(r, _mm256_set1_epi32(0x7fc0), nan);
}
inline void store_bf16(bf16* p, F x) {
  const __m256i packed = _mm256_packus_epi32(round_bf16(x.a), round_bf16(x.b));
  _mm256_storeu_si256((__m256i*)p, _mm256_permute4x64_epi64(packed, 0xd8));
}

struct Step {
  __m256i a, b;
};
inline Step load_steps(const char* p) {
  return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)(p + 32))};
}
inline Step broadcast_step(const char* p) {
  int32_t x;
  memcpy(&x, p, 4);
  const __m256i v = _mm256_set1_epi32(x);
  return {v, v};
}
// The first or the second bf16 of each lane's pair, widened.
template <int kHalf>
inline F load_half(const char* p) {
  const Step w = load_steps(p);
  const __m256i high = _mm256_set1_epi32(int(0xffff0000u));
  if (kHalf == 0)
    return {_mm256_castsi256_ps(_mm256_slli_epi32(w.a, 16)),
            _mm256_castsi256_ps(_mm256_slli_epi32(w.b, 16))};
  return {_mm256_castsi256_ps(_mm256_and_si256(w.a, high)),
          _mm256_castsi256_ps(_mm256_and_si256(w.b, high))};
}
inline F load_f32_steps(const char* p) { return load((const float*)p); }
// 16 even and 16 odd int8 weights as int16 pairs.
inline Step load_int8_pairs(const char* p) {
  const __m128i even = _mm_loadu_si128((const __m128i*)p);
  const __m128i odd = _mm_loadu_si128((const __m128i*)(p + 16));
  return {_mm256_cvtepi8_epi16(_mm_unpacklo_epi8(even, odd)),
          _mm256_cvtepi8_epi16(_mm_unpackhi_epi8(even, odd))};
}
inline Step zero_int32() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
inline Step dot_int16(Step acc, Step w, Step x) {
  return {_mm256_add_epi32(acc.a, _mm256_madd_epi16(w.a, x.a)),
          _mm256_add_epi32(acc.b, _mm256_madd_epi16(w.b, x.b))};
}
inline F to_float(Step x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
inline F and_not(F mask, F x) {
  return {_mm256_andnot_ps(mask.a, x.a), _mm256_andnot_ps(mask.b, x.b)};
}
// Nearest int16; |x| at most 32767.
inline void store_int16(int16_t* p, F x) {
  const __m256i packed = _mm256_packs_epi32(_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b));
  _mm256_storeu_si256((__m256i*)p, _mm256_permute4x64_epi64(packed, 0xd8));
}
constexpr int kTileRows = 6, kTileGroups = 1;
constexpr int kWideTileRows = 2, kWideTileGroups = 2;
constexpr int kProductsPerNs = 45;
// One: a row's sum has the same order whatever tile it is in, and memory bounds lone rows anyway.
constexpr int tile_copies(int, int) { return 1; }

// ---------------------------------------------------------------------------------------------
#else  // plain C++; compilers make 128-bit vectors of it on every 64-bit machine

struct F {
  float v[16];
};
#define COTRT_EACH(expr)                  \
  F r;                                    \
  for (int i = 0; i < 16; ++i) r.v[i] = (expr); \
  return r
inline F load(const float* p) { COTRT_EACH(p[i]); }
inline void store(float* p, F a) { memcpy(p, a.v, 64); }
inline F set1(float x) { COTRT_EACH(x); }
inline F zero() { COTRT_EACH(0.f); }
// x * y + z, fused where the machine fuses at no cost.
inline float multiply_add(float x, float y, float z) {
#ifdef __FP_FAST_FMAF
  return __builtin_fmaf(x, y, z);
#else
  return x * y + z;
#endif
}
inline F fma(F a, F b, F c) { COTRT_EACH(multiply_add(a.v[i], b.v[i], c.v[i])); }
inline F fms(F a, F b, F c) { COTRT_EACH(multiply_add(a.v[i], b.v[i], -c.v[i])); }
inline F add(F a, F b) { COTRT_EACH(a.v[i] + b.v[i]); }
inline F sub(F a, F b) { COTRT_EACH(a.v[i] - b.v[i]); }
inline F mul(F a, F b) { COTRT_EACH(a.v[i] * b.v[i]); }
inline F div(F a, F b) { COTRT_EACH(a.v[i] / b.v[i]); }
inline F max(F a, F b) { COTRT_EACH(a.v[i] > b.v[i] ? a.v[i] : b.v[i]); }
inline F min(F a, F b) { COTRT_EACH(a.v[i] < b.v[i] ? a.v[i] : b.v[i]); }
inline float reduce_add(F a) {
  for (int h = 8; h; h >>= 1)
    for (int i = 0; i < h; ++i) a.v[i] += a.v[i + h];
  return a.v[0];
}
inline float reduce_max(F a) {
  for (int h = 8; h; h >>= 1)
    for (int i = 0; i < h; ++i) a.v[i] = a.v[i] > a.v[i + h] ? a.v[i] : a.v[i + h];
  return a.v[0];
}
inline F add_exponent(F a, F shifted) {
  F r;
  for (int i = 0; i < 16; ++i) {
    uint32_t x, n;
    memcpy(&x, &a.v[i], 4);
    memcpy(&n, &shifted.v[i], 4);
    x += n << 23;
    memcpy(&r.v[i], &x, 4);
  }
  return r;
}
inline F keep_at_least(F a, F t) { COTRT_EACH(a.v[i] >= t.v[i] ? a.v[i] : 0.f); }
inline F first_lanes(F a, int n, F b) { COTRT_EACH(i < n ? a.v[i] : b.v[i]); }
inline float widen(uint32_t high) {
  const uint32_t u = high << 16;
  float f;
  memcpy(&f, &u, 4);
  return f;
}
inline F load_bf16(const bf16* p) { COTRT_EACH(widen(p[i].bits)); }
inline uint16_t round_bf16(float x) {
  uint32_t u;
  memcpy(&u, &x, 4);
  return x == x ? uint16_t((u + 0x7fff + ((u >> 16) & 1)) >> 16) : uint16_t(0x7fc0);
}
inline void store_bf16(bf16* p, F a) {
  for (int i = 0; i < 16; ++i) p[i].bits = round_bf16(a.v[i]);
}

// The first or the second bf16 of each lane's pair, widened.
template <int kHalf>
inline F load_half(const char* p) {
  uint32_t w[16];
  memcpy(w, p, 64);
  F r;
  for (int i = 0; i < 16; ++i) {
    const uint32_t u = kHalf == 0 ? w[i] << 16 : w[i] & 0xffff0000u;
    memcpy(&r.v[i], &u, 4);
  }
  return r;
}
inline F load_f32_steps(const char* p) { return load((const float*)p); }
template <int kHalf>
inline F load_int8_half(const char* p) {
  COTRT_EACH(float((signed char)p[16 * kHalf + i]));
}
#undef COTRT_EACH
constexpr int kTileRows = 2, kTileGroups = 1;
constexpr int kWideTileRows = 1, kWideTileGroups = 2;
constexpr int kProductsPerNs = 15;
constexpr int tile_copies(int, int) { return 1; }

#endif
// ---------------------------------------------------------------------------------------------

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

// Element types as the kernels see them: what a tile multiplies, and what the KV cache holds.
//
//   Element     of the weights, or of K and V
//   Row         of the rows that they are multiplied with; a weight step meets kRowStepBytes of them
//   kParts      products a step and lane: 1, or 2 where the halves of a pair are taken in turn
//   weights<h>  part h of a step's weights; row(p) the row's element at p, broadcast
struct F32Type {
  using Element = float;
  using Row = float;
  using Acc = F;
  static constexpr int kPerStep = 1, kParts = 1, kRowStepBytes = 4;
  static constexpr bool kFastExp = false;
  static inline F zero_acc() { return zero(); }
#if defined(COTRT_AVX512)
  template <int>
  static inline Step weights(const char* p) { return load_steps(p); }
  static inline Step row(const char* p) { return broadcast_step(p); }
  static inline F dot(F acc, Step w, Step x) { return dot_f32(acc, w, x); }
#else
  template <int>
  static inline F weights(const char* p) { return load_f32_steps(p); }
  static inline F row(const char* p) { return set1(*(const float*)p); }
  static inline F dot(F acc, F w, F x) { return fma(w, x, acc); }
#endif
  static inline void store_row(char* p, F a) { store((float*)p, a); }
  static inline F load_element(const char* p) { return load((const float*)p); }
  static inline void store_element(char* p, F a) { store((float*)p, a); }
};
#if defined(COTRT_AVX512) || defined(COTRT_EMULATED_PAIRS)
struct Bf16Type {
  using Element = bf16;
  using Row = bf16;
  using Acc = F;
  static constexpr int kPerStep = 2, kParts = 1, kRowStepBytes = 4;
  static constexpr bool kFastExp = true;  // finer than what bf16 weights keep
  static inline F zero_acc() { return zero(); }
  template <int>
  static inline Step weights(const char* p) { return load_steps(p); }
  static inline Step row(const char* p) { return broadcast_step(p); }
  static inline F dot(F acc, Step w, Step x) { return dot_bf16(acc, w, x); }
  static inline void store_row(char* p, F a) { store_bf16((bf16*)p, a); }
  static inline F load_element(const char* p) { return load_bf16((const bf16*)p); }
  static inline void store_element(char* p, F a) { store_bf16((bf16*)p, a); }
};
struct Int8Type : Bf16Type {  // int8 weights beside bf16 rows
  template <int>
  static inline Step weights(const char* p) { return load_int8_steps(p); }
};
#else
// Without a product of bf16 pairs rows stay float32: nothing is rounded and nothing widened twice.
struct Bf16Type : F32Type {
  using Element = bf16;
  static constexpr int kPerStep = 2, kParts = 2, kRowStepBytes = 8;
  static constexpr bool kFastExp = true;
  template <int kHalf>
  static inline F weights(const char* p) { return load_half<kHalf>(p); }
  static inline F load_element(const char* p) { return load_bf16((const bf16*)p); }
  static inline void store_element(char* p, F a) { store_bf16((bf16*)p, a); }
};
#if defined(COTRT_AVX2)
// int8 weights beside rows of int16 (quantise_rows): exact sums in int32, 16 products an
// instruction where float32 has 8.
struct Int8Type {
  using Acc = Step;
  static constexpr int kPerStep = 2, kParts = 1, kRowStepBytes = 4;
  static inline Step zero_acc() { return zero_int32(); }
  template <int>
  static inline Step weights(const char* p) { return load_int8_pairs(p); }
  static inline Step row(const char* p) { return broadcast_step(p); }
  static inline Step dot(Step acc, Step w, Step x) { return dot_int16(acc, w, x); }
};
inline void store(float* p, Step x) { store(p, to_float(x)); }
#else
struct Int8Type : Bf16Type {
  template <int kHalf>
  static inline F weights(const char* p) { return load_int8_half<kHalf>(p); }
};
#endif
#endif
// What a linear's rows must be beside weights of a type.
inline DType row_type(DType weights) {
  if (weights == DType::kFloat32) return DType::kFloat32;
#if defined(COTRT_AVX512) || defined(COTRT_EMULATED_PAIRS)
  return DType::kBFloat16;
#elif defined(COTRT_AVX2)
  return weights == DType::kInt8 ? DType::kInt16 : DType::kFloat32;
#else
  return DType::kFloat32;
#endif
}

inline void store_as(char* p, DType type, F a) {
  if (type == DType::kFloat32)
    store((float*)p, a);
  else
    store_bf16((bf16*)p, a);
}
