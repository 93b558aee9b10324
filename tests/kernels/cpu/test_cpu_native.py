"""The module itself: what it serves, its threads, its instruction sets, and life without it."""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from cotrt.cli import doctor
from cotrt.kernels.cpu import native
from cotrt.kernels.cpu.linear import PackedWeight
from cotrt.kernels.cpu.support import refusal
from cotrt.kernels.dispatch import choose

HERE = Path(__file__).parent
ROOT = HERE.parents[2]


def python(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.skipif("COTRT_EXPECT_NATIVE" not in os.environ, reason="may be installed pure")
def test_without_the_module_this_run_would_be_wrong() -> None:
    """Set where a compiler is: an install that fell back to torch has hidden a broken build."""
    assert native.missing_reason() is None


def test_the_native_kernels_are_chosen_on_a_cpu() -> None:
    backend = choose("cpu", torch.bfloat16, 64, 16)
    assert backend.name == "cpu"


@pytest.mark.parametrize(
    ("device", "dtype", "head_dim", "block_size", "what"),
    [
        ("cuda", torch.bfloat16, 64, 16, "not on cuda"),
        ("cpu", torch.float64, 64, 16, "float64"),
        ("cpu", torch.bfloat16, 72, 16, "head_dim 72"),
        ("cpu", torch.bfloat16, 512, 16, "head_dim 512"),
        ("cpu", torch.bfloat16, 64, 24, "block_size 24"),
        ("cpu", torch.bfloat16, 64, 512, "block_size 512"),
    ],
)
def test_what_they_cannot_serve(
    device: str, dtype: torch.dtype, head_dim: int, block_size: int, what: str
) -> None:
    assert what in str(refusal(device, dtype, head_dim, block_size))


def test_without_the_module_torch_serves_and_one_log_line_says_so() -> None:
    done = python(
        "import sys, logging, torch\n"
        "sys.modules['cotrt.kernels.cpu._native'] = None\n"
        "logging.basicConfig(stream=sys.stdout)\n"
        "from cotrt.kernels.dispatch import choose\n"
        "for _ in range(2): b = choose('cpu', torch.bfloat16, 64, 16)\n"
        "print(b.name, b.why)\n"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("several times slower") == 1
    assert "reference plain torch" in done.stdout and "compiler" in done.stdout


def test_an_instruction_set_that_is_not_there_is_refused() -> None:
    done = python(
        "import torch\n"
        "from cotrt.errors import InvalidRequestError\n"
        "from cotrt.kernels.dispatch import choose\n"
        "try: choose('cpu', torch.bfloat16, 64, 16)\n"
        "except InvalidRequestError as error: print(error)\n",
        COTRT_CPU_ISA="mmx",
    )
    assert "COTRT_CPU_ISA=mmx" in done.stdout and "generic" in done.stdout, done.stderr


def isas() -> list[str]:
    """Those of the machine, and AMX in software."""
    if native.missing_reason():
        return []
    return [*native.module().available_isas(), *native.module().emulated_isas()]


@pytest.mark.parametrize("isa", isas())
def test_every_instruction_set_passes_these_tests(isa: str) -> None:
    if isa == native.isa():
        pytest.skip("it is the one in use")
    names = ["matrix_tiles", "tree_attention", "linear", "deterministic"]
    if not isa.startswith("amx"):  # the rest of which is that of another
        names += ["kv_cache", "sample"]
    files = [str(HERE / f"test_cpu_{name}.py") for name in names]
    files.append(str(ROOT / "tests/models/test_decoder_stack.py"))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *files],
        cwd=ROOT,
        env={**os.environ, "COTRT_CPU_ISA": isa},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]


@pytest.mark.skipif(
    "COTRT_EXPECT_NATIVE" not in os.environ or platform.machine() != "x86_64",
    reason="may be built by an old compiler, or for another machine",
)
def test_a_build_for_x86_has_matrix_tiles() -> None:
    assert native.module().built_isas() == ["amx", "avx512bf16", "avx2", "generic"]
    assert not set(native.module().available_isas()) - set(native.module().built_isas())


emulated = pytest.mark.skipif("amx_emulated" not in isas(), reason="a machine without AVX2")


@emulated
@pytest.mark.parametrize("kernel", ["linear", "attention"])
def test_matrix_tiles_that_compute_wrongly_are_passed_over(kernel: str) -> None:
    """The emulated set stands for AMX: it is checked before it is taken, as AMX is."""
    choose_isa, names = native.module().choose_isa, ["amx_emulated", "avx2", "generic"]
    assert choose_isa(names) == ("amx_emulated", "")
    name, warning = choose_isa(names, spoiled=kernel)
    assert name == "avx2"
    assert "amx_emulated" in warning and "self-check" in warning and kernel in warning
    with pytest.raises(RuntimeError, match="COTRT_CPU_ISA=amx_emulated: its self-check failed"):
        choose_isa(names, forced="amx_emulated", spoiled=kernel)
    assert choose_isa(names, forced="generic", spoiled=kernel) == ("generic", "")


@emulated
def test_the_emulation_is_taken_by_name_alone_and_says_so() -> None:
    assert native.module().choose_isa(["avx2", "generic"]) == ("avx2", "")
    done = python(
        "import sys, logging, torch\n"
        "logging.basicConfig(stream=sys.stdout)\n"
        "from cotrt.kernels.dispatch import choose\n"
        "for _ in range(2): choose('cpu', torch.bfloat16, 64, 16)\n",
        COTRT_CPU_ISA="amx_emulated",
    )
    assert done.stdout.count("Running on the amx_emulated kernels") == 1, done.stderr
    assert done.stdout.count("for tests alone") == 1


def test_the_doctor_says_why_a_better_set_was_passed_over(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(native, "isa_warning", lambda: "the amx kernels failed")
    monkeypatch.setattr(doctor, "_self_test", lambda model: 0)
    assert doctor.run(argparse.Namespace(model=None)) == 0
    assert "warning: the amx kernels failed" in capsys.readouterr().out


def linear() -> tuple[PackedWeight, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(640, 64, generator=generator).bfloat16()
    x = torch.randn(40, 64, generator=generator).bfloat16()
    packed = PackedWeight([weight], dtype=torch.bfloat16)
    return packed, x, packed(x)


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_results_do_not_depend_on_the_number_of_threads(count: int) -> None:
    packed, x, expected = linear()
    try:
        assert native.set_num_threads(count) == count
        assert native.module().num_threads() == count
        for _ in range(50):
            assert torch.equal(packed(x), expected)
    finally:
        native.set_num_threads(None)


def test_callers_from_many_threads_take_turns() -> None:
    packed, x, expected = linear()
    wrong: list[int] = []

    def work() -> None:
        for _ in range(100):
            if not torch.equal(packed(x), expected):
                wrong.append(1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong and not any(thread.is_alive() for thread in threads)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_has_threads_of_its_own() -> None:
    done = python(
        "import os, sys, warnings\n"
        "warnings.simplefilter('ignore')\n"
        "import torch\n"
        "from cotrt.kernels.cpu import native\n"
        "from cotrt.kernels.cpu.linear import PackedWeight\n"
        "native.set_num_threads(2)\n"
        "w = PackedWeight([torch.ones(640, 64)], dtype=torch.float32)\n"
        "x = torch.ones(40, 64)\n"
        "assert w(x).eq(64).all()\n"
        "pid = os.fork()\n"
        "if pid == 0: os._exit(0 if w(x).eq(64).all() else 1)\n"
        "sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))\n"
    )
    assert done.returncode == 0, done.stderr


def test_no_second_openmp_and_no_link_to_torch() -> None:
    extension = Path(native.module().__file__)
    needed = extension.read_bytes()
    assert b"libtorch" not in needed and b"libgomp" not in needed
