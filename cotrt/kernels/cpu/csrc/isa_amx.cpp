#define COTRT_AVX512 1
#define COTRT_ISA isa_amx
#define COTRT_ISA_NAME "amx"
#define COTRT_BASE kernels_avx512bf16
#include "isa_matrix.h"

namespace cotrt {
const KernelTable* kernels_amx() { return isa_amx::table(); }
}  // namespace cotrt
