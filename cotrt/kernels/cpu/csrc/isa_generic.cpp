#define COTRT_GENERIC 1
#define COTRT_ISA isa_generic
#define COTRT_ISA_NAME "generic"
#include "isa_table.h"

namespace cotrt {
const KernelTable* kernels_generic() { return &isa_generic::kTable; }
}  // namespace cotrt
