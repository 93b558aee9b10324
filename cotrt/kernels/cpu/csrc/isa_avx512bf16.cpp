#define COTRT_AVX512 1
#define COTRT_ISA isa_avx512bf16
#define COTRT_ISA_NAME "avx512bf16"
#include "isa_table.h"

namespace cotrt {
const KernelTable* kernels_avx512bf16() { return &isa_avx512bf16::kTable; }
}  // namespace cotrt
