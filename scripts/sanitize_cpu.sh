#!/usr/bin/env bash
# Runs the CPU kernels' tests under the address and undefined-behaviour sanitizers, on a copy of
# the checkout, once for each instruction set that this machine runs and for those in software:
#
#   scripts/sanitize_cpu.sh [pytest arguments]
#
# Needs g++, cmake, and a Python that has the test requirements and nanobind (PYTHON=...).
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd -P)
python=$(realpath -s "${PYTHON:-$root/.venv/bin/python}")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir "$work/tests"
cp -r "$root/cotrt" "$root/pyproject.toml" "$root/CMakeLists.txt" "$work/"
for part in conftest.py isolation kernels; do
    cp -r "$root/tests/$part" "$work/tests/"
done
mkdir "$work/tests/models"
cp "$root/tests/models/test_decoder_stack.py" "$work/tests/models/"
rm -f "$work"/cotrt/kernels/cpu/_native*.so

cmake -S "$work" -B "$work/build" -DPython_EXECUTABLE="$python" -DCOTRT_SANITIZE=ON >"$work/log"
cmake --build "$work/build" -j "$(nproc)" >>"$work/log" 2>&1 || { tail -40 "$work/log"; exit 1; }
cp "$work"/build/_native*.so "$work/cotrt/kernels/cpu/"

# Python and torch allocate before the sanitizer's options could spare them: leaks are not looked
# for. The preloaded runtime must come first.
export LD_PRELOAD="$(g++ -print-file-name=libasan.so) $(g++ -print-file-name=libubsan.so)"
export ASAN_OPTIONS=detect_leaks=0:abort_on_error=1:alloc_dealloc_mismatch=0
export UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1
export PYTHONPATH=$work
cd "$work"
"$python" -c "from cotrt.kernels.cpu.native import module; print(module().__file__)"
isas=$("$python" -c 'from cotrt.kernels.cpu.native import module; m = module(); print(*m.available_isas(), *m.emulated_isas())')
for isa in $isas; do
    echo "== $isa"
    COTRT_CPU_ISA=$isa "$python" -m pytest -q -p no:cacheprovider \
        tests/kernels/cpu tests/models/test_decoder_stack.py \
        -k "not without_the_module and not forked and not every_instruction_set" "$@"
done
