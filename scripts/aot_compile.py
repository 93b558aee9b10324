"""Compile every Triton kernel ahead of time, with no GPU, and say what each variant takes.

    python scripts/aot_compile.py                                  # the set that CI compiles
    python scripts/aot_compile.py --write docs/kernels-triton.md   # and put the table in the docs
    python scripts/aot_compile.py --quick                          # a handful, for the tests

Fails on a compile error, on a register spill (a stack frame, that is), and on shared memory
beyond the chip's, which the compiler itself does not refuse.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

# Shared memory a program may have, bytes.
LIMITS = {80: 163 * 1024, 90: 227 * 1024}
BEGIN, END = "<!-- aot table: begin -->", "<!-- aot table: end -->"


@dataclass(frozen=True)
class Job:
    """One variant: which kernel, what to call it, and what is compiled in."""

    kernel: str  # "module:function" in cotrt.kernels.triton
    name: str
    types: dict[str, str]
    constants: dict[str, Any]
    aligned: tuple[str, ...]  # integers that are multiples of 16 in real launches
    num_warps: int = 4
    num_stages: int = 3
    fuses: bool = True  # products and sums may be one instruction


@dataclass(frozen=True)
class Result:
    """What one variant takes on one chip."""

    registers: int
    stack: int
    shared: int
    error: str = ""

    def failure(self, capability: int) -> str:
        if self.error:
            return self.error
        if self.stack:
            return f"spills: a stack frame of {self.stack} bytes"
        if self.shared > LIMITS[capability]:
            return f"{self.shared} bytes of shared memory, {LIMITS[capability]} allowed"
        return ""


def attention_jobs(quick: bool) -> list[Job]:
    import torch

    from cotrt.kernels.triton.attention_launch import merge_constants
    from cotrt.kernels.triton.attention_variants import TILES, choose_variant, largest_tile
    from cotrt.kernels.triton.tree_attention import attend_constants

    names = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
    bf16, fp16, fp32 = names
    shapes: list[tuple[int, int, int, int, Any]] = []  # head_dim, heads, block, tile, dtype
    for head_dim in (128,) if quick else (64, 80, 96, 128, 256):
        tiles = [tile for tile in TILES if tile <= largest_tile(head_dim, bf16)]
        shapes += [(head_dim, 4, 16, tile, bf16) for tile in tiles]
        if not quick:
            shapes += [(head_dim, 4, 16, tile, fp16) for tile in (16, 64)]
            shapes += [(head_dim, 4, 16, largest_tile(head_dim, fp32), fp32)]
    if not quick:
        shapes += [(128, 4, block, 64, bf16) for block in (8, 32, 64, 128, 256)]
        for heads in (1, 3, 7, 8, 16):
            shapes += [(128, heads, 16, tile, bf16) for tile in (16, 64)]
        shapes += [(64, heads, 16, 64, bf16) for heads in (3, 7)]
    jobs = []
    for head_dim, heads, block, tile, dtype in shapes:
        variant = choose_variant(head_dim, heads, block, tile, dtype)
        pointer = f"*{names[dtype]}"
        types = dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "out_ptr"), pointer)
        types |= dict.fromkeys(("partial_ptr", "lse_ptr"), "*fp32") | {"qk_scale": "fp32"}
        jobs.append(
            Job(
                "attention_kernel:attend_kernel",
                f"attend {names[dtype]} {variant.name}",
                types,
                attend_constants(variant, dtype),
                ("stride",),
                variant.num_warps,
                variant.num_stages,
            )
        )
        if (heads, block, tile) == (4, 16, 16) and (dtype == bf16 or head_dim == 128):
            types = {"partial_ptr": "*fp32", "lse_ptr": "*fp32", "out_ptr": pointer}
            constants = merge_constants(head_dim)
            name = f"merge {names[dtype]} d{head_dim}"
            jobs.append(
                Job("attention_kernel:merge_kernel", name, types, constants, ("stride",), 2)
            )
    return jobs


def deterministic_jobs(quick: bool) -> list[Job]:
    import torch

    from cotrt.kernels.triton.attention_launch import merge_constants
    from cotrt.kernels.triton.fixed_chunks import attend_chunks_constants, fixed_variant
    from cotrt.kernels.triton.fixed_rows import linear_constants, tile_for

    names = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
    bf16, fp16, fp32 = names
    shapes: list[tuple[int, int, int, Any]] = [(128, 4, 16, bf16)]  # head_dim, heads, block, dtype
    if not quick:
        shapes += [(head_dim, 4, 16, bf16) for head_dim in (64, 80, 96, 256)]
        shapes += [(head_dim, 4, 16, fp16) for head_dim in (64, 128)]
        shapes += [(head_dim, 4, 16, fp32) for head_dim in (64, 80, 96, 128, 256)]
        shapes += [(128, heads, 16, bf16) for heads in (1, 3, 7, 8, 16)]
        shapes += [(128, 4, block, bf16) for block in (8, 32, 64, 128, 256)]
    jobs = []
    for head_dim, heads, block, dtype in shapes:
        variant = fixed_variant(head_dim, heads, block, dtype)
        pointer = f"*{names[dtype]}"
        types = dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "out_ptr"), pointer)
        types |= dict.fromkeys(("partial_ptr", "state_ptr"), "*fp32") | {"qk_scale": "fp32"}
        jobs.append(
            Job(
                "chunk_kernel:attend_chunks_kernel",
                f"attend_chunks {names[dtype]} {variant.name}",
                types,
                attend_chunks_constants(variant, dtype),
                ("stride",),
                variant.num_warps,
                variant.num_stages,
                fuses=False,
            )
        )
        if (heads, block) == (4, 16) and (dtype == bf16 or head_dim == 128):
            types = {"partial_ptr": "*fp32", "state_ptr": "*fp32", "out_ptr": pointer}
            jobs.append(
                Job(
                    "chunk_kernel:merge_chunks_kernel",
                    f"merge_chunks {names[dtype]} d{head_dim}",
                    types,
                    merge_constants(head_dim),
                    ("stride",),
                    2,
                    fuses=False,
                )
            )
    for dtype in (bf16,) if quick else (bf16, fp16, fp32):
        tiles = {tile_for(n, dtype): None for n in (512, 2048, 8192)}
        for tile in tiles:
            for has_bias in (False,) if quick else (False, True):
                types = dict.fromkeys(
                    ("x_ptr", "weight_ptr", "bias_ptr", "out_ptr"), f"*{names[dtype]}"
                )
                name = f"linear {names[dtype]} {tile.rows}x{tile.outputs}x{tile.inputs}"
                jobs.append(
                    Job(
                        "fixed_rows:fixed_linear_kernel",
                        name + (" with bias" if has_bias else ""),
                        types,
                        linear_constants(tile, dtype, has_bias),
                        ("num_outputs", "num_inputs"),
                        tile.num_warps,
                        tile.num_stages,
                    )
                )
    return jobs


def small_jobs(quick: bool) -> list[Job]:
    from cotrt.kernels.triton.rms_norm import num_warps_for
    from cotrt.kernels.triton.sample import BLOCK, CANDIDATES

    jobs = [
        Job(
            "copy_blocks:copy_blocks_kernel",
            "copy_blocks",
            {"caches_ptr": "*i64"},
            {"WORDS": 1024},
            ("block_words",),
        )
    ]
    jobs += [
        Job(
            "kv_cache:records_kernel",
            f"records {'read' if reads else 'write'} b16",
            {"caches_ptr": "*i64"},
            {"READS": reads, "BS": 16, "WORDS": 1024},
            ("row_words",),
        )
        for reads in (True, False)
    ]
    draws = {"temperature_ptr": "*fp64", "top_p_ptr": "*fp64", "min_p_ptr": "*fp64"}
    draws |= dict.fromkeys(("logits_ptr", "raw_ptr", "logprobs_ptr"), "*fp32")
    draws |= dict.fromkeys(("biases_ptr", "repetition_ptr"), "*fp32") | {"bad_ptr": "*i8"}
    draws |= dict.fromkeys(("presence_ptr", "frequency_ptr"), "*fp32")
    sizes = {"CANDIDATES": CANDIDATES, "BLOCK": BLOCK}
    jobs += [
        Job("sample_kernel:sample_kernel", "sample", draws, sizes, ("stride",), 8),
        Job(
            "penalties:penalties_kernel",
            "penalties",
            draws,
            {"BLOCK": 256},
            ("stride",),
            fuses=False,
        ),
        Job("penalties:count_kernel", "count drawn tokens", draws, {"BLOCK": 256}, ()),
    ]
    for dtype in ("bf16",) if quick else ("bf16", "fp16", "fp32"):
        pointer = f"*{dtype}"
        for block in (512, 1024, 4096, 8192) if dtype == "bf16" and not quick else (4096,):
            jobs.append(
                Job(
                    "rms_norm:rms_norm_kernel",
                    f"rms_norm {dtype} {block} with residual",
                    dict.fromkeys(
                        ("x_ptr", "residual_ptr", "weight_ptr", "y_ptr", "sum_ptr"), pointer
                    )
                    | {"eps": "fp32"},
                    {"HAS_RESIDUAL": True, "BLOCK": block},
                    ("stride", "size"),
                    num_warps_for(block),
                )
            )
        jobs.append(
            Job(
                "silu_and_mul:silu_and_mul_kernel",
                f"silu_and_mul {dtype}",
                {"x_ptr": pointer, "out_ptr": pointer},
                {"BLOCK": 1024},
                ("stride", "size"),
            )
        )
        heads = dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "q_weight_ptr", "k_weight_ptr"), pointer)
        heads |= dict.fromkeys(("q_out_ptr", "k_out_ptr", "k_cache_ptr", "v_cache_ptr"), pointer)
        heads |= {"cos_ptr": "*fp32", "sin_ptr": "*fp32", "slots_ptr": "*i64", "eps": "fp32"}
        for size in (64, 80, 128, 256) if dtype == "bf16" and not quick else (128,):
            half = 1 << (size // 2 - 1).bit_length()
            blocks = {"BLOCK_H": 8, "BLOCK": half}
            jobs.append(
                Job("rotary:rotary_kernel", f"rotary {dtype} d{size}", heads, blocks, ("stride",))
            )
            jobs.append(
                Job(
                    "write_kv:norm_rotary_write_kernel",
                    f"norm_rotary_write_kv {dtype} d{size}",
                    heads,
                    blocks | {"HAS_NORM": True, "BS": 16},
                    ("stride",),
                )
            )
            jobs.append(
                Job(
                    "write_kv:write_kv_kernel",
                    f"write_kv {dtype} d{size}",
                    heads,
                    {"BLOCK_H": 8, "BLOCK": 2 * half, "BS": 16},
                    ("stride",),
                )
            )
    return jobs


def all_jobs(quick: bool) -> list[Job]:
    return attention_jobs(quick) + deterministic_jobs(quick) + small_jobs(quick)


def compile_one(job: Job, capability: int) -> Result:
    import importlib

    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    module, _, function = job.kernel.partition(":")
    kernel = getattr(importlib.import_module(f"cotrt.kernels.triton.{module}"), function)
    names = kernel.arg_names
    signature = {}
    for name in names:
        default = "*i32" if name.endswith("_ptr") else "i32"
        signature[name] = "constexpr" if name in job.constants else job.types.get(name, default)
    aligned = [n for n in names if n.endswith("_ptr") or n.startswith(job.aligned)]
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(names.index(n),): value for n, value in job.constants.items()},
        attrs={(names.index(n),): [["tt.divisibility", 16]] for n in aligned},
    )
    options = {"num_warps": job.num_warps, "num_stages": job.num_stages}
    options["enable_fp_fusion"] = job.fuses
    try:
        made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    except Exception as error:  # a table of all failures says more than the first
        return Result(0, 0, 0, f"{type(error).__name__}: {str(error).strip().splitlines()[-1]}")
    tool = os.path.join(os.path.dirname(triton.__file__), "backends/nvidia/bin/cuobjdump")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        usage = subprocess.run(
            [tool, "-res-usage", file.name], capture_output=True, text=True, check=True
        )
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", usage.stdout)
    assert found, usage.stdout
    registers, stack, _, local = map(int, found.groups())
    return Result(registers, stack + local, made.metadata.shared)


def table(jobs: list[Job], results: dict[tuple[str, int], Result]) -> str:
    lines = [
        "| variant | sm_80 registers | shared KB | spills | sm_90 registers | shared KB | spills |",
        "| --- | --: | --: | --: | --: | --: | --: |",
    ]
    for job in jobs:
        cells = [job.name]
        for capability in LIMITS:
            made = results[job.name, capability]
            cells += [str(made.registers), f"{made.shared / 1024:.1f}", str(made.stack)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a handful of variants")
    parser.add_argument("--workers", type=int, default=min(4, os.cpu_count() or 1))
    parser.add_argument("--write", type=Path, help="a file whose table is brought up to date")
    options = parser.parse_args()
    if os.environ.pop("TRITON_INTERPRET", None):
        print("TRITON_INTERPRET is set aside: interpreted kernels cannot be compiled")
    begin = time.perf_counter()
    jobs = all_jobs(options.quick)
    keys = [(job, capability) for job in jobs for capability in LIMITS]
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(options.workers, context) as pool:
        made = pool.map(compile_one, *zip(*keys, strict=True))
        results = {(job.name, cap): result for (job, cap), result in zip(keys, made, strict=True)}
    text = table(jobs, results)
    print(text)
    if options.write is not None:
        page = options.write.read_text()
        head, rest = page.split(BEGIN)
        tail = rest.split(END)[1]
        options.write.write_text(f"{head}{BEGIN}\n{text}\n{END}{tail}")
    failures = [
        f"{job.name} sm_{capability}: {failure}"
        for job, capability in keys
        if (failure := results[job.name, capability].failure(capability))
    ]
    seconds = time.perf_counter() - begin
    print(f"\n{len(keys)} compiled in {seconds:.0f} s, {len(failures)} failed")
    for failure in failures:
        print("FAILED", failure)
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
