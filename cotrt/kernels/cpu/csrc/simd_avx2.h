// The lanes of simd.h in two 256-bit registers.

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
constexpr int kProductsPerNs = 75;
// One: a row's sum has the same order whatever tile it is in, and memory bounds lone rows anyway.
constexpr int tile_copies(int, int) { return 1; }
