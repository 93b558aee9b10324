// The lanes of simd.h in plain C++: compilers make 128-bit vectors of it on every 64-bit machine.

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
