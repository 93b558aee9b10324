// Chooses the instruction set once a process: the best that the machine runs, or COTRT_CPU_ISA.
#include <cstdlib>
#include <stdexcept>
#include <string>

#include "cpu_features.h"

namespace cotrt {
namespace {

#if defined(COTRT_HAVE_X86)
bool runs_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
         __builtin_cpu_supports("bmi2");
}
bool runs_avx512bf16() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512bf16");
}
#endif

const KernelTable* choose() {
  const std::vector<std::string> names = available_isas();
  std::string want = names.front();
  if (const char* forced = std::getenv("COTRT_CPU_ISA"); forced && *forced) {
    want = forced;
    bool known = false;
    for (const std::string& n : names) known = known || n == want;
    if (!known) {
      std::string all;
      for (const std::string& n : names) all += (all.empty() ? "" : ", ") + n;
      throw std::runtime_error("COTRT_CPU_ISA=" + want + ": this machine runs " + all);
    }
  }
#if defined(COTRT_HAVE_X86)
  if (want == "avx512bf16") return kernels_avx512bf16();
  if (want == "avx2") return kernels_avx2();
#endif
  return kernels_generic();
}

}  // namespace

std::vector<std::string> available_isas() {
  std::vector<std::string> names;
#if defined(COTRT_HAVE_X86)
  __builtin_cpu_init();
  if (runs_avx512bf16()) names.push_back("avx512bf16");
  if (runs_avx2()) names.push_back("avx2");
#endif
  names.push_back("generic");
  return names;
}

const KernelTable& kernels() {
  static const KernelTable* const table = choose();
  return *table;
}

}  // namespace cotrt
