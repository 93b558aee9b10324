// The matrix kernels over tile registers in software, and beside them vector code that takes rows of
// bf16 as AVX-512 does: for tests, on machines with AVX2 alone. Never chosen but by name.
#define COTRT_AVX2 1
#define COTRT_EMULATED_PAIRS 1
#define COTRT_ISA isa_pairs_emulated
#define COTRT_ISA_NAME "pairs_emulated"
#include "isa_table.h"

namespace cotrt {
static const KernelTable* kernels_pairs_emulated() { return &isa_pairs_emulated::kTable; }
}  // namespace cotrt

#undef COTRT_ISA
#undef COTRT_ISA_NAME
#define COTRT_AMX_EMULATED 1
#define COTRT_ISA isa_amx_emulated
#define COTRT_ISA_NAME "amx_emulated"
#define COTRT_BASE kernels_pairs_emulated
#include "isa_matrix.h"

namespace cotrt {
const KernelTable* kernels_amx_emulated() { return isa_amx_emulated::table(); }
}  // namespace cotrt
