// Where every number lies in memory. All kernels read weights and KV blocks in these layouts only.
//
// A "lane group" is 16 float32 accumulators, the width of an AVX-512 register; narrower machines
// use several registers for one. A "k step" is what one lane consumes at a time: a pair of bf16
// (the operand of vdpbf16ps) or one float32. Both are 4 bytes, so one set of strides serves both.
//
//   packed linear  W[N, K] -> [N/32][K steps][2][16 lanes] k steps      (N padded with zero rows)
//                  element (n, k) in bf16: panel n/32, step k/2, lane n%32, half k%2.
//                  One panel of 32 outputs is one sequential stream of 128 bytes a step.
//                  int8: the same order with 1 byte an element; a step of 16 lanes is 16 bytes of
//                  the even k's, then 16 bytes of the odd k's.
//                  int16: as bf16, with a scale an output. The rows beside it have a scale every
//                  kScaleGroup inputs.
//                  gate/up pairs are interleaved by 16: lanes 0-15 of panel j are gate rows
//                  16j.., lanes 16-31 up rows 16j.., so that silu(gate)*up needs no second pass.
//   K block        [kv head][tokens/16][D steps][16 tokens] k steps: tokens across lanes, a score
//                  tile is "packed linear" with tokens for outputs. Blocks of 8: [D steps][8].
//   V block        [kv head][token steps][D lanes] k steps: head dim across lanes, pairs of tokens
//                  (bf16) or single tokens (float32) as steps.
//   cache          [num_blocks][one K or V block]; K and V are separate tensors, one pair a layer.
//
// Rows of activations are plain row-major; a k step of a row is 4 consecutive bytes, broadcast.
#pragma once

#include "common.h"

namespace cotrt {

constexpr int kLanes = 16;
constexpr int kPanel = 32;  // outputs a panel of a packed linear
constexpr int kStepBytes = 4;
constexpr int kLaneGroupBytes = kLanes * kStepBytes;  // 64

// Inputs whose products are summed in int32 before they are scaled and added in float32.
constexpr int kScaleGroup = 64;
constexpr int num_scale_groups(int k) { return (k + kScaleGroup - 1) / kScaleGroup; }

// Elements in one k step.
inline int step_elements(DType t) { return t == DType::kFloat32 ? 1 : 2; }
inline int element_bytes(DType t) {
  return t == DType::kFloat32 ? 4 : t == DType::kInt8 ? 1 : 2;
}

// Bytes of one (block, kv head) of K or of V.
inline int64_t kv_head_bytes(DType t, int block_size, int head_dim) {
  return int64_t(block_size) * head_dim * element_bytes(t);
}

// Tokens that lie side by side in a K block.
inline int k_lanes(int block_size) { return block_size < kLanes ? block_size : kLanes; }

inline int64_t packed_panel_bytes(DType t, int k) {
  return int64_t(kPanel) * k * element_bytes(t);
}

}  // namespace cotrt
