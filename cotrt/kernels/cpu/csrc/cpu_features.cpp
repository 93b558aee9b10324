// Chooses the instruction set once a process: the best that the machine runs, or COTRT_CPU_ISA.
#include "cpu_features.h"

#include <cstdlib>
#include <stdexcept>

#include "self_check.h"

#if defined(COTRT_HAVE_AMX)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

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

#if defined(COTRT_HAVE_AMX)
// The processor has tiles and bf16 products, the system saves tiles (XCR0 bits 17 and 18), and it
// lets this process use them: asked for once, before any thread of ours is there.
bool runs_amx() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (!runs_avx512bf16() || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  constexpr unsigned kAmxBf16 = 1u << 22, kAmxTile = 1u << 24;
  if (!(d & kAmxBf16) || !(d & kAmxTile)) return false;
  unsigned low = 0, high = 0;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  constexpr unsigned kTileState = (1u << 17) | (1u << 18);
  if ((low & kTileState) != kTileState) return false;
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  static const bool granted = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  return granted;
}
#endif

bool machine_runs(const std::string& name) {
#if defined(COTRT_HAVE_X86)
  __builtin_cpu_init();
#if defined(COTRT_HAVE_AMX)
  if (name == "amx") return runs_amx();
#endif
  if (name == "avx512bf16") return runs_avx512bf16();
  if (name == "avx2") return runs_avx2();
#endif
  return name == "generic";
}

const KernelTable* table_of(const std::string& name) {
#if defined(COTRT_HAVE_AMX)
  if (name == "amx") return kernels_amx();
#endif
#if defined(COTRT_HAVE_X86)
  if (name == "amx_emulated") return kernels_amx_emulated();
  if (name == "avx512bf16") return kernels_avx512bf16();
  if (name == "avx2") return kernels_avx2();
#endif
  return kernels_generic();
}

// What is wrong with it. Sets that have never been run where they were written are checked.
std::string fault_of(const KernelTable& table, const std::string& spoiled) {
  const std::string name = table.name;
  if (name != "amx" && name != "amx_emulated") return "";
  KernelTable checked = table;
  if (spoiled == "linear") checked.linear = [](const LinearArgs&, int, int, int, int) {};
  if (spoiled == "attention")
    checked.attention = [](const AttentionArgs&, const AttentionJob&, const AttentionJob*, char*) {};
  return self_check(checked);
}

bool contains(const std::vector<std::string>& names, const std::string& name) {
  for (const std::string& n : names)
    if (n == name) return true;
  return false;
}

}  // namespace

std::vector<std::string> built_isas() {
  return {
#if defined(COTRT_HAVE_AMX)
      "amx",
#endif
#if defined(COTRT_HAVE_X86)
      "avx512bf16", "avx2",
#endif
      "generic"};
}

std::vector<std::string> available_isas() {
  std::vector<std::string> names;
  for (const std::string& name : built_isas())
    if (machine_runs(name)) names.push_back(name);
  return names;
}

std::vector<std::string> emulated_isas() {
  if (machine_runs("avx2")) return {"amx_emulated"};
  return {};
}

IsaChoice choose_isa(const std::vector<std::string>& names, const std::string& forced,
                     const std::string& spoiled) {
  if (!forced.empty()) {
    std::string all;
    for (const std::string& n : names) all += (all.empty() ? "" : ", ") + n;
    if (!contains(names, forced) && !contains(emulated_isas(), forced))
      throw std::runtime_error("COTRT_CPU_ISA=" + forced + ": this machine runs " + all);
    const KernelTable* table = table_of(forced);
    const std::string fault = fault_of(*table, spoiled);
    if (!fault.empty())
      throw std::runtime_error("COTRT_CPU_ISA=" + forced + ": its self-check failed (" + fault +
                               "); this machine runs " + all);
    return {table, contains(names, forced) ? "" : "its instructions are emulated, for tests alone"};
  }
  std::string warning;
  for (const std::string& name : names) {
    const KernelTable* table = table_of(name);
    const std::string fault = fault_of(*table, spoiled);
    if (fault.empty()) return {table, warning};
    warning = "the " + name + " kernels failed their self-check on this machine (" + fault + ")";
  }
  return {kernels_generic(), warning};
}

const IsaChoice& isa_choice() {
  static const IsaChoice choice = [] {
    const char* forced = std::getenv("COTRT_CPU_ISA");
    return choose_isa(available_isas(), forced ? forced : "", "");
  }();
  return choice;
}

const KernelTable& kernels() { return *isa_choice().table; }

}  // namespace cotrt
