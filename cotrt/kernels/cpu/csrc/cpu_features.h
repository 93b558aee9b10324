#pragma once

#include <string>
#include <vector>

#include "kernel_table.h"

namespace cotrt {

// The instruction sets that this build has and this machine runs, best first.
std::vector<std::string> available_isas();

}  // namespace cotrt
