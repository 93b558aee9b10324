#pragma once

#include <string>
#include <vector>

#include "kernel_table.h"

namespace cotrt {

// The instruction sets that this build has, best first; without those for tests.
std::vector<std::string> built_isas();
// Those of them that this machine runs.
std::vector<std::string> available_isas();
// Those for tests, which are taken only where they are asked for by name.
std::vector<std::string> emulated_isas();

struct IsaChoice {
  const KernelTable* table;
  std::string warning;  // empty, or why a better one was passed over, or that it is emulated
};

// The first of `names`, best first, that passes its self-check; or `forced`, which must pass it.
// An empty `forced` leaves the choice free. Throws std::runtime_error where forced is neither among
// the names nor emulated here, or computes wrongly. `spoiled`: for tests, the kernel ("linear" or
// "attention") that is taken for broken in the sets that are checked.
IsaChoice choose_isa(const std::vector<std::string>& names, const std::string& forced,
                     const std::string& spoiled);

// The choice of this process, made once: of available_isas() and COTRT_CPU_ISA.
const IsaChoice& isa_choice();

}  // namespace cotrt
