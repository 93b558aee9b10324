#define COTRT_AVX2 1
#define COTRT_INTEGER_PRODUCTS 1
#define COTRT_ISA isa_avx2
#define COTRT_ISA_NAME "avx2"
#include "isa_table.h"

namespace cotrt {
const KernelTable* kernels_avx2() { return &isa_avx2::kTable; }
}  // namespace cotrt
