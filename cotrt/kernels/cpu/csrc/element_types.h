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
#if defined(COTRT_INTEGER_PRODUCTS)
// Weights beside rows of int16 (quantise_rows), for scaled_tile.h: exact sums in int32, 16 products
// an instruction where float32 has 8.
struct Int16Type {
  using Acc = Step;
  static constexpr int kPerStep = 2, kParts = 1, kRowStepBytes = 4;
  static inline Step zero_acc() { return zero_int32(); }
  template <int>
  static inline Step weights(const char* p) { return load_steps(p); }
  static inline Step row(const char* p) { return broadcast_step(p); }
  static inline Step dot(Step acc, Step w, Step x) { return dot_int16(acc, w, x); }
};
struct Int8Type : Int16Type {
  template <int>
  static inline Step weights(const char* p) { return load_int8_pairs(p); }
};
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
#elif defined(COTRT_INTEGER_PRODUCTS)
  return weights == DType::kInt8 || weights == DType::kInt16 ? DType::kInt16 : DType::kFloat32;
#else
  return DType::kFloat32;
#endif
}

inline DType packed_type(DType asked) {
#if defined(COTRT_INTEGER_PRODUCTS)
  if (asked == DType::kBFloat16) return DType::kInt16;
#endif
  return asked;
}

inline void store_as(char* p, DType type, F a) {
  if (type == DType::kFloat32)
    store((float*)p, a);
  else
    store_bf16((bf16*)p, a);
}
