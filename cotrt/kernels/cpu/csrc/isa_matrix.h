// The body of isa_amx*.cpp: linears and attention by matrix tiles, in a namespace of their own. All
// else, and what has too few rows or too short sums for a tile, is that of COTRT_BASE.
// Standard headers as in isa_table.h.
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "kernel_table.h"

#include <immintrin.h>

namespace cotrt {
namespace COTRT_ISA {

#include "simd.h"
#include "tile.h"
#include "epilogue.h"
#include "attention_keys.h"
#include "attention_weights.h"
#include "attention.h"
#include "tile_registers.h"
#include "matrix_tile.h"
#include "matrix_linear.h"
#include "matrix_attention.h"

// Sums shorter than a tile's 32 elements are for vector code. Where the order of sums is fixed, the
// number of rows decides nothing.
constexpr int kMatrixInputs = 2 * kTileSteps;

static void linear(const LinearArgs& a, int m0, int m1, int panel0, int panel1) {
  const bool few = !a.fixed_order && m1 - m0 < kMatrixLinearRows;
  if (a.weight_type == DType::kFloat32 || few || a.k < kMatrixInputs)
    return COTRT_BASE()->linear(a, m0, m1, panel0, panel1);
  if (a.weight_type == DType::kInt8) return matrix_linear<MatrixInt8>(a, m0, m1, panel0, panel1);
  matrix_linear<MatrixBf16>(a, m0, m1, panel0, panel1);
}

static void attention(const AttentionArgs& a, const AttentionJob& job, const AttentionJob* next,
                      char* scratch) {
  const bool few = !a.fixed_chunks && job.last - job.first < kMatrixAttentionRows;
  if (a.type == DType::kFloat32 || few || a.head_dim < kMatrixInputs)
    return COTRT_BASE()->attention(a, job, next, scratch);
  const TileScope scope(kTileHeight);
  attention_job<Bf16Type, MatrixTiles>(a, job, next, scratch);
}

static const KernelTable* table() {
  static const KernelTable made = [] {
    KernelTable t = *COTRT_BASE();
    t.name = COTRT_ISA_NAME;
    t.max_tile_rows = kMostTileRows;
    t.products_per_ns = 800;
    t.job_row_unit = kTileHeight;
    t.row_block = 256;
    t.linear = linear;
    t.attention = attention;
    return t;
  }();
  return &made;
}

}  // namespace COTRT_ISA
}  // namespace cotrt
