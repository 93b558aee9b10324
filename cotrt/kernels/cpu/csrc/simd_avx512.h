// The lanes of simd.h in one 512-bit register, with products of bf16 pairs.

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
// Lane m of the result: the lanes of row m folded in the order of reduce_add and reduce_max. Pairs of
// rows share a register from the first fold on, where each row alone would take as many steps.
template <class Fold>
inline F fold_rows(const F* rows, Fold fold) {
  __m512 a[8], b[4], c[2];
  for (int m = 0; m < 8; ++m) {  // 8 lanes of row m, 8 of row m + 8
    const __m512 x = rows[m].v, y = rows[m + 8].v;
    a[m] = fold(_mm512_shuffle_f32x4(x, y, 0xEE), _mm512_shuffle_f32x4(x, y, 0x44));
  }
  for (int m = 0; m < 4; ++m)  // 4 lanes of rows m, m + 8, m + 4, m + 12
    b[m] = fold(_mm512_shuffle_f32x4(a[m], a[m + 4], 0xDD),
                _mm512_shuffle_f32x4(a[m], a[m + 4], 0x88));
  for (int m = 0; m < 2; ++m)
    c[m] = fold(_mm512_shuffle_ps(b[m], b[m + 2], 0x44), _mm512_shuffle_ps(b[m], b[m + 2], 0xEE));
  const __m512 d = fold(_mm512_shuffle_ps(c[0], c[1], 0x88), _mm512_shuffle_ps(c[0], c[1], 0xDD));
  const __m512i order = _mm512_setr_epi32(0, 2, 1, 3, 8, 10, 9, 11, 4, 6, 5, 7, 12, 14, 13, 15);
  return {_mm512_permutexvar_ps(order, d)};
}
// out[0, 16) of n rows, 1 to 16: reduce_max (reduce_add) of each, to the bit.
template <class Fold>
inline void fold_each(const F* rows, int n, float* out, Fold fold) {
  F all[kLanes];
  for (int m = 0; m < kLanes; ++m) all[m] = rows[m < n ? m : 0];
  store(out, fold_rows(all, fold));
}
inline void reduce_max_each(const F* rows, int n, float* out) {
  fold_each(rows, n, out, [](__m512 a, __m512 b) { return _mm512_max_ps(a, b); });
}
inline void reduce_add_each(const F* rows, int n, float* out) {
  fold_each(rows, n, out, [](__m512 a, __m512 b) { return _mm512_add_ps(a, b); });
}
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
