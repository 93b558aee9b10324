// Types and small helpers shared by every file of the native CPU kernels.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace cotrt {

// A bfloat16 as its 16 bits. Arithmetic happens in float32.
struct bf16 {
  uint16_t bits;
};

enum class DType : int { kFloat32 = 0, kBFloat16 = 1, kInt8 = 2, kFloat16 = 3, kInt16 = 4 };

inline int ceil_div(int a, int b) { return (a + b - 1) / b; }
inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int min_int(int a, int b) { return a < b ? a : b; }
inline int max_int(int a, int b) { return a > b ? a : b; }
inline int clamp_int(int x, int lo, int hi) { return x < lo ? lo : (x > hi ? hi : x); }

}  // namespace cotrt
