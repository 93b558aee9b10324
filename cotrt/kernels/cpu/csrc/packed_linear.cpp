#include "packed_linear.h"

#include <cmath>
#include <stdexcept>

namespace cotrt {
namespace {

inline float half_to_float(uint16_t h) {
  const uint32_t sign = uint32_t(h & 0x8000) << 16, exponent = (h >> 10) & 31, mantissa = h & 1023;
  if (exponent == 0) {
    const float f = std::ldexp(float(mantissa), -24);
    return sign ? -f : f;
  }
  const uint32_t u =
      sign | (exponent == 31 ? 0x7f800000u : (exponent + 112) << 23) | (mantissa << 13);
  float f;
  std::memcpy(&f, &u, 4);
  return f;
}

inline float as_float(uint32_t u) {
  float f;
  std::memcpy(&f, &u, 4);
  return f;
}

inline uint16_t round_bf16(float x) {
  uint32_t u;
  std::memcpy(&u, &x, 4);
  return x == x ? uint16_t((u + 0x7fff + ((u >> 16) & 1)) >> 16) : uint16_t(0x7fc0);
}

void read_row(const void* source, DType type, int64_t offset, int k, float* out) {
  switch (type) {
    case DType::kFloat32:
      std::memcpy(out, static_cast<const float*>(source) + offset, size_t(k) * 4);
      return;
    case DType::kBFloat16: {
      const uint16_t* p = static_cast<const uint16_t*>(source) + offset;
      for (int i = 0; i < k; ++i) out[i] = as_float(uint32_t(p[i]) << 16);
      return;
    }
    case DType::kFloat16: {
      const uint16_t* p = static_cast<const uint16_t*>(source) + offset;
      for (int i = 0; i < k; ++i) out[i] = half_to_float(p[i]);
      return;
    }
    default: throw std::invalid_argument("weights come as float32, bfloat16 or float16");
  }
}

}  // namespace

PackedLinear::PackedLinear(int n, int k, DType type, bool interleave)
    : n_(n),
      k_(k),
      num_panels_(ceil_div(n, kPanel)),
      type_(kernels().packed_type(type)),
      interleave_(interleave) {
  if (n <= 0 || k <= 0) throw std::invalid_argument("a linear needs rows and columns");
  if (type != DType::kFloat32 && k % 2) throw std::invalid_argument("k must be even");
  if (interleave && n % kPanel) throw std::invalid_argument("gate and up need multiples of 16 rows");
  data_ = WeightMemory(size_t(num_panels_) * packed_panel_bytes(type_, k));
  if (type_ == DType::kInt8 || type_ == DType::kInt16) scale_.reserve(size_t(num_panels_) * kPanel * 4);
}

int PackedLinear::lane_of(int row) const {
  if (!interleave_) return row;
  const int half = n_ / 2, up = row >= half, r = up ? row - half : row;
  return r / kLanes * kPanel + up * kLanes + r % kLanes;
}

void PackedLinear::fill(int row0, int rows, const void* source, DType source_type) {
  if (row0 < 0 || rows < 0 || row0 + rows > n_) throw std::invalid_argument("rows out of range");
  constexpr int kRows = 64;
  const int k = k_;
  parallel_for(ceil_div(rows, kRows), [&](int chunk, int) {
    std::vector<float> row(k);
    std::vector<signed char> quantised(k);
    const int end = min_int(rows, (chunk + 1) * kRows);
    for (int r = chunk * kRows; r < end; ++r) {
      const int lane = lane_of(row0 + r), in_panel = lane % kPanel;
      char* to = data_.data() + int64_t(lane / kPanel) * packed_panel_bytes(type_, k);
      if (type_ == DType::kBFloat16 && source_type == DType::kBFloat16) {
        const char* from = static_cast<const char*>(source) + int64_t(r) * k * 2;
        for (int s = 0; s < k / 2; ++s)
          std::memcpy(to + (int64_t(s) * kPanel + in_panel) * 4, from + s * 4, 4);
        continue;
      }
      read_row(source, source_type, int64_t(r) * k, k, row.data());
      if (type_ == DType::kFloat32) {
        for (int i = 0; i < k; ++i)
          std::memcpy(to + (int64_t(i) * kPanel + in_panel) * 4, &row[i], 4);
      } else if (type_ == DType::kBFloat16) {
        for (int i = 0; i < k; ++i) {
          const uint16_t x = round_bf16(row[i]);
          std::memcpy(to + (int64_t(i / 2) * kPanel + in_panel) * 4 + (i % 2) * 2, &x, 2);
        }
      } else if (type_ == DType::kInt16) {
        if (source_type != DType::kBFloat16)
          for (float& x : row) x = as_float(uint32_t(round_bf16(x)) << 16);
        fill_int16(row.data(), lane);
      } else {
        float most = 0.f;
        for (int i = 0; i < k; ++i) most = std::fmax(most, std::fabs(row[i]));
        const float scale = most / 127.f;
        scale_.as<float>()[lane] = scale;
        const float divisor = scale > 0.f ? scale : 1.f;
        for (int i = 0; i < k; ++i)
          to[int64_t(i / 2) * 2 * kPanel + in_panel / kLanes * 2 * kLanes + (i % 2) * kLanes +
             in_panel % kLanes] = char(std::lrintf(row[i] / divisor));
      }
    }
  });
}

// As int16 times the smallest scale with which no sum over kScaleGroup inputs leaves int32.
void PackedLinear::fill_int16(const float* row, int lane) {
  // |sum of w x| <= kRowLimit * sum of |w|, where rounding may add a half to each.
  constexpr float kMostSum = 2147483647.f / kRowLimit - kScaleGroup / 2 - 64;
  float most = 0.f, densest = 0.f, all = 0.f;
  for (int i = 0; i < k_; i += kScaleGroup) {
    float sum = 0.f;
    for (int j = i; j < min_int(k_, i + kScaleGroup); ++j) {
      most = std::fmax(most, std::fabs(row[j]));
      sum += std::fabs(row[j]);
    }
    densest = std::fmax(densest, sum);
    all += sum;
  }
  const float scale = std::fmax(most / 32767.f, densest / kMostSum);
  const bool finite = std::isfinite(all), some = finite && scale > 1e-36f;
  // What is not finite must show: all of the output becomes NaN.
  scale_.as<float>()[lane] = some ? scale : finite ? 0.f : NAN;
  const float inverse = some ? 1.f / scale : 0.f;
  char* to = data_.data() + int64_t(lane / kPanel) * packed_panel_bytes(type_, k_) + lane % kPanel * 4;
  for (int i = 0; i < k_; i += 2) {
    int16_t pair[2];
    for (int j = 0; j < 2; ++j) pair[j] = some ? int16_t(std::lrintf(row[i + j] * inverse)) : 0;
    std::memcpy(to + int64_t(i / 2) * kPanel * 4, pair, 4);
  }
}

void PackedLinear::fill_bias(int row0, int rows, const float* bias) {
  if (row0 < 0 || rows < 0 || row0 + rows > n_) throw std::invalid_argument("rows out of range");
  bias_.reserve(size_t(num_panels_) * kPanel * 4);
  for (int r = 0; r < rows; ++r) bias_.as<float>()[lane_of(row0 + r)] = bias[r];
}

void PackedLinear::unpack_row(int64_t row, float* out) const {
  kernels().unpack_row(data_.data(), type_, k_, scale_.as<float>(), lane_of(int(row)), out);
}

LinearArgs PackedLinear::args() const {
  LinearArgs a{};
  a.weight = data_.data();
  a.weight_type = type_;
  a.n = n_;
  a.k = k_;
  a.scale = scale_.as<float>();
  a.bias = bias_.as<float>();
  return a;
}

LinearChunks::LinearChunks(const PackedLinear& w, int m_, int num_threads_)
    : m(m_), num_panels(w.num_panels()), num_threads(num_threads_) {
  // Rows of activations that stay in a core's cache beside the panel that is read.
  const int64_t row_bytes = int64_t(w.k()) * element_bytes(kernels().row_type(w.type()));
  const int tile = kernels().max_tile_rows;
  int rows = int(clamp_int(int((int64_t(384) << 10) / row_bytes), 48, 384)) / tile * tile;
  if (m <= rows + rows / 2) rows = max_int(m, 1);
  row_chunks = max_int(1, ceil_div(m, rows));
  rows_per_chunk = ceil_div(ceil_div(m, row_chunks), tile) * tile;
  row_chunks = max_int(1, ceil_div(m, rows_per_chunk));
  // Nanoseconds a panel, roughly: bytes at 25 GB/s, and products.
  const double ns = double(packed_panel_bytes(w.type(), w.k())) / 25. +
                    double(min_int(m, rows_per_chunk)) * w.k() * kPanel / kernels().products_per_ns;
  const int by_cost = int(15000. / ns);
  const int by_threads = num_panels / (num_threads * 4);
  panels_per_chunk = max_int(1, min_int(by_cost, row_chunks >= num_threads * 4 ? 8 : by_threads));
  panel_chunks = ceil_div(num_panels, panels_per_chunk);
}

void LinearChunks::run(const LinearArgs& args, int chunk) const {
  // Neighbouring chunks share rows, so that activations stay in cache.
  const int row = chunk / panel_chunks, panel = chunk % panel_chunks;
  const int m0 = row * rows_per_chunk, p0 = panel * panels_per_chunk;
  // The chunk that this thread will probably claim next; past the last one args.next stays.
  LinearArgs a = args;
  const int next = chunk + num_threads;
  if (next < count())
    a.next = a.weight + next % panel_chunks * panels_per_chunk * packed_panel_bytes(a.weight_type, a.k);
  kernels().linear(a, m0, min_int(m, m0 + rows_per_chunk), p0,
                   min_int(num_panels, p0 + panels_per_chunk));
}

}  // namespace cotrt
