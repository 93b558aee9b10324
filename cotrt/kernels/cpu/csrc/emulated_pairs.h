// Products of bf16 pairs beside AVX2's registers, for sets that are emulated: what vdpbf16ps does,
// but for its denormals.

// 16 even and 16 odd int8 weights as bf16 pairs; every int8 is exact in bf16.
inline Step load_int8_steps(const char* p) {
  uint32_t pairs[16];
  for (int i = 0; i < 16; ++i) {
    const float even = float((signed char)p[i]), odd = float((signed char)p[16 + i]);
    uint32_t low, high;
    memcpy(&low, &even, 4);
    memcpy(&high, &odd, 4);
    pairs[i] = low >> 16 | high;
  }
  return load_steps((const char*)pairs);
}
inline __m256 low_half(__m256i x) { return _mm256_castsi256_ps(_mm256_slli_epi32(x, 16)); }
inline __m256 high_half(__m256i x) {
  return _mm256_castsi256_ps(_mm256_and_si256(x, _mm256_set1_epi32(int(0xffff0000u))));
}
inline __m256 dot_pairs(__m256 acc, __m256i w, __m256i x) {
  return _mm256_fmadd_ps(low_half(w), low_half(x),
                         _mm256_fmadd_ps(high_half(w), high_half(x), acc));
}
inline F dot_bf16(F acc, Step w, Step x) {
  return {dot_pairs(acc.a, w.a, x.a), dot_pairs(acc.b, w.b, x.b)};
}
