#include "self_check.h"

#include <cmath>
#include <vector>

#include "aligned_buffer.h"

namespace cotrt {
namespace {

// Numbers from -1 to 1 that are exact in bfloat16.
struct Numbers {
  uint32_t state = 1;
  float next() {
    state = state * 1664525u + 1013904223u;
    return float(int(state >> 24) - 128) / 128.f;
  }
  uint16_t next_bf16() {
    const float x = next();
    uint32_t u;
    std::memcpy(&u, &x, 4);
    return uint16_t(u >> 16);
  }
  std::vector<uint16_t> bf16s(size_t n) {
    std::vector<uint16_t> v(n);
    for (uint16_t& x : v) x = next_bf16();
    return v;
  }
};

constexpr uint16_t kNaN = 0x7fc0;

bool close(float a, float b, float tolerance) { return std::fabs(a - b) <= tolerance; }

float widen(uint16_t x) {
  const uint32_t u = uint32_t(x) << 16;
  float f;
  std::memcpy(&f, &u, 4);
  return f;
}

std::vector<float> widen(const std::vector<uint16_t>& x) {
  std::vector<float> wide;
  for (uint16_t v : x) wide.push_back(widen(v));
  return wide;
}

// m rows times three panels, the last of 8 lanes; 104 inputs are 3 tiles of steps and a rest.
bool linear_agrees(const KernelTable& table, DType type, int m) {
  constexpr int kOutputs = 72, kInputs = 104;
  Numbers numbers;
  const int panels = ceil_div(kOutputs, kPanel);
  const size_t bytes = size_t(panels) * size_t(packed_panel_bytes(type, kInputs));
  std::vector<uint16_t> weight(bytes / 2);
  for (uint16_t& w : weight)
    w = type == DType::kInt8 ? uint16_t(int(numbers.next() * 32767.f)) : numbers.next_bf16();
  const std::vector<uint16_t> x = numbers.bf16s(size_t(m) * kInputs);
  std::vector<float> scale(size_t(panels) * kPanel, 1.f / 127), bias(size_t(panels) * kPanel);
  for (float& b : bias) b = numbers.next();
  std::vector<float> found(size_t(m) * kOutputs, NAN), expected = found;
  LinearArgs a{};
  a.weight = reinterpret_cast<const char*>(weight.data());
  a.weight_type = type;
  a.n = kOutputs;
  a.k = kInputs;
  a.x = reinterpret_cast<const char*>(x.data());
  a.x_stride = kInputs * 2;
  a.scale = type == DType::kInt8 ? scale.data() : nullptr;
  a.bias = bias.data();
  a.epilogue = Epilogue::kStore;
  a.y_stride = kOutputs * 4;
  a.y_type = DType::kFloat32;
  a.y = reinterpret_cast<char*>(found.data());
  table.linear(a, 0, m, 0, panels);
  const std::vector<float> wide = widen(x);  // the generic kernels take rows of float32
  a.x = reinterpret_cast<const char*>(wide.data());
  a.x_stride = kInputs * 4;
  a.y = reinterpret_cast<char*>(expected.data());
  kernels_generic()->linear(a, 0, m, 0, panels);
  for (size_t i = 0; i < found.size(); ++i)
    if (!close(found[i], expected[i], 1e-4f)) return false;
  return true;
}

// Branches of three heads over 265 keys, NaN behind them: two chunks, an odd last token, and head
// dims that are no whole number of tiles.
bool attention_agrees(const KernelTable& table, int block_size, int branches) {
  constexpr int kHeads = 3, kDim = 80, kLength = 265;
  Numbers numbers;
  const int num_blocks = ceil_div(kLength, block_size), rows = branches * kHeads;
  const size_t elements = size_t(num_blocks) * size_t(block_size) * kDim;
  std::vector<uint16_t> k = numbers.bf16s(elements), v = numbers.bf16s(elements);
  for (int token = kLength; token < num_blocks * block_size; ++token)
    for (int i = 0; i < kDim; ++i) {
      const size_t block = size_t(token / block_size) * size_t(block_size) * kDim;
      const int t = token % block_size;
      k[block + size_t(t / kLanes * kLanes * kDim + (i / 2 * kLanes + t % kLanes) * 2 + i % 2)] = kNaN;
      v[block + size_t((t / 2 * kDim + i) * 2 + t % 2)] = kNaN;
    }
  const std::vector<uint16_t> q = numbers.bf16s(size_t(rows) * kDim);
  std::vector<uint16_t> found(q.size(), kNaN);
  const std::vector<float> wide = widen(q);
  std::vector<float> expected(q.size(), NAN);
  std::vector<int32_t> blocks, positions, group_rows, partials, partial_offsets{0};
  for (int b = 0; b < num_blocks; ++b) blocks.push_back(b);
  for (int r = 0; r < branches; ++r) {
    positions.push_back(kLength - 1 - 3 * r);
    group_rows.push_back(r);
    partials.push_back(-1);
    partial_offsets.push_back(r + 1);
  }
  const int32_t start = 0, length = kLength, causal = 1;
  const int32_t block_offsets[] = {0, num_blocks}, row_offsets[] = {0, branches};
  AttentionArgs a{};
  a.type = DType::kBFloat16;
  a.q = reinterpret_cast<const char*>(q.data());
  a.q_stride = a.out_stride = kHeads * kDim * 2;
  a.k_cache = reinterpret_cast<const char*>(k.data());
  a.v_cache = reinterpret_cast<const char*>(v.data());
  a.num_q_heads = kHeads;
  a.num_kv_heads = 1;
  a.head_dim = kDim;
  a.block_size = block_size;
  a.scale = 0.2f;
  a.query_positions = positions.data();
  a.group_blocks = blocks.data();
  a.group_block_offsets = block_offsets;
  a.group_start = &start;
  a.group_len = &length;
  a.group_rows = group_rows.data();
  a.group_row_offsets = row_offsets;
  a.group_causal = &causal;
  a.row_partials = partials.data();
  a.row_partial_offsets = partial_offsets.data();
  AlignedBuffer scratch;
  scratch.reserve(attention_scratch_bytes());
  const AttentionJob job{0, 0, rows, 0, 1};
  a.out = reinterpret_cast<char*>(found.data());
  table.attention(a, job, nullptr, scratch.data());
  a.q = reinterpret_cast<const char*>(wide.data());
  a.out = reinterpret_cast<char*>(expected.data());
  a.q_stride = a.out_stride = kHeads * kDim * 4;
  kernels_generic()->attention(a, job, nullptr, scratch.data());
  for (size_t i = 0; i < found.size(); ++i)
    if (!close(widen(found[i]), expected[i], 1e-2f)) return false;
  return true;
}

}  // namespace

std::string self_check(const KernelTable& table) {
  for (DType type : {DType::kBFloat16, DType::kInt8})
    for (int m : {1, 7, 40, 53})
      if (!linear_agrees(table, type, m))
        return std::string("a linear of ") + (type == DType::kInt8 ? "int8" : "bfloat16") +
               " weights and " + std::to_string(m) + " rows is wrong";
  for (int block_size : {16, 64})
    for (int branches : {1, 4, 13})
      if (!attention_agrees(table, block_size, branches))
        return "attention of " + std::to_string(branches) + " branches over blocks of " +
               std::to_string(block_size) + " is wrong";
  return "";
}

}  // namespace cotrt
