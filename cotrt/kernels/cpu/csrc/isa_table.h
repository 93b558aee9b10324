// The body of every isa_*.cpp: all kernels in a namespace of their own, and their table.
// Standard headers only by name, no std templates: those would be compiled with this file's flags
// and could be linked into code that runs on any machine.
#include <math.h>

#include "kernel_table.h"

#if defined(COTRT_AVX512) || defined(COTRT_AVX2)
#include <immintrin.h>
#endif

namespace cotrt {
namespace COTRT_ISA {

#include "simd.h"
#include "tile.h"
#include "scaled_tile.h"
#include "epilogue.h"
#include "linear.h"
#include "attention_keys.h"
#include "attention_weights.h"
#include "attention.h"
#include "attention_merge.h"
#include "rows.h"
#include "sample.h"

static const KernelTable kTable = {
    COTRT_ISA_NAME, kTileRows,    kProductsPerNs,  1,              0,
    packed_type,    row_type,     linear,          quantise_rows,  unpack_row,
    attention,      attention_merge, rope_and_write, write_kv,     rms_norm,
    silu_mul,       block_maxima, exp_sum,         sum_at_least,   race,
};

}  // namespace COTRT_ISA
}  // namespace cotrt
