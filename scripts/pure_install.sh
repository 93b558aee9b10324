#!/usr/bin/env bash
# Installs cotrt as it is where there is no compiler, into a temporary folder, and runs the kernels'
# tests and a prompt on the starter model there:
#
#   scripts/pure_install.sh [pytest arguments]
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd -P)
python=$(realpath -s "${PYTHON:-$root/.venv/bin/python}")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
COTRT_PURE=1 "$python" -m pip install -q --disable-pip-version-check --no-deps \
    --target "$work/site" "$root"
mkdir "$work/tests"
for part in conftest.py isolation kernels sampling; do
    cp -r "$root/tests/$part" "$work/tests/"
done
cp "$root/pyproject.toml" "$work/"
unset COTRT_EXPECT_NATIVE
# Without `site` no editable install of this checkout comes before the folder.
packages=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
export PYTHONPATH=$work/site:$packages
cd "$work"
"$python" -S - <<'PROGRAM'
import cotrt
from cotrt import LLM, SamplingParams
from cotrt.kernels.cpu.native import missing_reason

assert "site" in cotrt.__file__, cotrt.__file__
print(missing_reason())
with LLM("smollm2-135m", kv_cache_memory_bytes=1 << 28) as llm:
    assert llm.kernels == "reference", llm.kernels
    params = SamplingParams(temperature=0, max_tokens=4)
    text = llm.generate("The capital of France is", params, use_tqdm=False)[0].outputs[0].text
    assert text.startswith(" Paris"), text
PROGRAM
"$python" -S -m pytest -q tests/kernels tests/sampling --ignore tests/kernels/triton_kernels "$@"
