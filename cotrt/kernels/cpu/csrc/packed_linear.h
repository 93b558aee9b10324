// The weights of one linear (or of several fused side by side) in the packed layout.
#pragma once

#include <vector>

#include "aligned_buffer.h"
#include "kernel_table.h"
#include "thread_pool.h"
#include "weight_memory.h"

namespace cotrt {

class PackedLinear {
 public:
  // type: float32, bf16 (packed as KernelTable::packed_type says) or int8; int8 and int16 have one
  // scale an output. interleave: n is 2 I, gate rows then up.
  PackedLinear(int n, int k, DType type, bool interleave);

  // Packs rows [row0, row0 + rows) from row-major [rows, k] memory of the given type. Each row is
  // filled once; the source is not kept.
  void fill(int row0, int rows, const void* source, DType source_type);
  void fill_bias(int row0, int rows, const float* bias);
  // Row of the weight (not interleaved) as float32.
  void unpack_row(int64_t row, float* out) const;

  int n() const { return n_; }
  int k() const { return k_; }
  DType type() const { return type_; }
  int num_panels() const { return num_panels_; }
  // The largest int16 activation with which sums over kScaleGroup inputs stay within int32.
  int int16_limit() const { return type_ == DType::kInt8 ? 32767 : kRowLimit; }
  int64_t bytes() const { return num_panels_ * packed_panel_bytes(type_, k_); }
  // Weight, bias and scale set; the caller adds rows and epilogue.
  LinearArgs args() const;

 private:
  // Of rows beside int16 weights: 14 bits with the sign leave about 15 to the weights.
  static constexpr int kRowLimit = 8191;

  void fill_int16(const float* row, int lane);
  int lane_of(int row) const;  // where a row of the weight lies among the lanes

  int n_, k_, num_panels_;
  DType type_;
  bool interleave_;
  WeightMemory data_;
  AlignedBuffer bias_, scale_;
};

// How a linear over m rows is cut into chunks of about equal cost.
struct LinearChunks {
  int m, num_panels, rows_per_chunk, panels_per_chunk, row_chunks, panel_chunks;
  LinearChunks(const PackedLinear& w, int m, int num_threads);
  int count() const { return row_chunks * panel_chunks; }
  void run(const LinearArgs& args, int chunk) const;
  int num_threads;
};

}  // namespace cotrt
