// Whether an instruction set computes what it should on this machine.
#pragma once

#include <string>

#include "kernel_table.h"

namespace cotrt {

// Some linears and attention products beside those of kernels_generic(), about two milliseconds.
// The table's rows are bf16 where weights are not float32. Empty where they agree, else what does not.
std::string self_check(const KernelTable& table);

}  // namespace cotrt
