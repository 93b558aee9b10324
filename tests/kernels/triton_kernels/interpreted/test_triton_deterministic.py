"""A row's bits are its own: linears in any batch, attention in any plan, logits of a whole LLM.

In the interpreter these show that no shape and no order of a sum depends on the batch; that a
device's instructions treat the rows of a tile alike shows on a device only, where they run too.
"""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from attention_trees import Node
from checkpoints import make_model, random_ids, save
from chunk_cases import Case, exact, make_case, one_by_one, plan_of, same_bits

from cotrt import LLM, SamplingParams, models
from cotrt.kernels.triton import attention_launch, fixed_chunks, self_check
from cotrt.kernels.triton.attention_work import AttentionWork
from cotrt.kernels.triton.fixed_rows import linear, tile_for
from cotrt.kernels.triton.sample import sample
from cotrt.kernels.triton.tree_attention import new_graph_plan, tree_attention
from cotrt.models.decoder import Decoder
from cotrt.plan import AttentionPlan
from cotrt.sampling.sampler import log_normalizers
from cotrt.tree.attention.planner import AttentionPlanner, PlanCosts, PlanLeaf

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = pytest.mark.parametrize("dtype", [FP32, BF16, FP16], ids=["fp32", "bf16", "fp16"])
# A program takes milliseconds in the interpreter: shorter chunks there, of the same kernels.
INTERPRETED = not torch.cuda.is_available()
CHUNK = 64 if INTERPRETED else 256


@pytest.fixture
def short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cotrt.kernels.triton.fixed_chunks.CHUNK_TOKENS", CHUNK)


@DTYPES
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_linear_gives_a_row_the_same_bits_in_any_batch(
    dtype: torch.dtype, has_bias: bool, device: torch.device
) -> None:
    outputs, inputs, count = (50, 70, 70) if INTERPRETED else (2500, 1538, 450)
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    weight, bias, x = random(outputs, inputs), random(outputs), random(count, inputs)
    own = functools.partial(linear, weight=weight, bias=bias if has_bias else None)
    whole = own(x)
    expected = torch.nn.functional.linear(
        x.double(), weight.double(), bias.double() if has_bias else None
    )
    error = (whole.double() - expected).abs() / expected.abs().clamp(min=1)
    assert error.max() < {FP32: 1e-4, BF16: 2**-8, FP16: 2**-11}[dtype] * 1.01
    rows = tile_for(outputs, dtype).rows
    for i in (0, 1, rows - 1, count - 1):
        assert same_bits(own(x[i : i + 1]), whole[i : i + 1]), i
    for m in (2, rows - 1, rows + 1) if INTERPRETED else (2, 3, 17, 63, 64, 65, 100, 200):
        assert same_bits(own(x[:m]), whole[:m]), m
    order = torch.randperm(count, generator=generator).to(device)
    assert same_bits(own(x[order]), whole[order])
    x[1::2] = torch.nan  # whatever is beside it
    assert same_bits(own(x)[::2], whole[::2])


@pytest.mark.parametrize("outputs", [100, 2048, 8192])
def test_a_weight_has_one_tile(outputs: int) -> None:
    for dtype in (FP32, BF16, FP16):
        tile = tile_for(outputs, dtype)
        assert outputs >= 16 * tile.outputs or tile.outputs == 32
        assert min(tile.rows, tile.outputs, tile.inputs) >= 16


def test_logprobs_are_a_rows_own(device: torch.device) -> None:
    count, vocab_size = (10, 203) if INTERPRETED else (self_check.NUM_ROWS, 49_152)
    rows = 3 * torch.randn(count, vocab_size, generator=torch.Generator().manual_seed(0))

    def sampled(logits: torch.Tensor) -> torch.Tensor:
        each = torch.arange(len(logits), device=device)
        off = torch.zeros(len(logits), device=device)
        one, key = off + 1, off.int()
        found = sample(logits, each, one, off, 0.9 * one, off, key, key)
        return torch.stack((found[0].double(), found[1].double()), 1)

    for function in (sampled, log_normalizers):
        assert self_check.is_own(function, rows.to(device))


def attend(case: Case, plan: AttentionPlan, device: torch.device) -> torch.Tensor:
    q, k, v = (x.to(device) for x in (case.q, case.k, case.v))
    out = torch.full_like(q, torch.nan)
    return tree_attention(q, k, v, plan, scale=0.125, out=out).cpu()


@pytest.mark.usefixtures("short_chunks")
@pytest.mark.parametrize(
    ("seed", "heads", "kv_heads", "dtype"),
    [(20, 3, 1, FP32), (33, 4, 2, BF16), (24, 7, 1, FP16)],
    ids=["fp32", "bf16", "fp16"],
)
def test_attention_gives_a_row_the_same_bits_in_any_plan(
    seed: int, heads: int, kv_heads: int, dtype: torch.dtype, device: torch.device
) -> None:
    few: dict[str, int] = {"max_sequences": 3, "max_rows": 3} if INTERPRETED else {}
    options: dict[str, Any] = {"head_dim": 64, "chunk": CHUNK, **few}
    case = make_case(seed, dtype, 16, heads, kv_heads, **options)
    stem, count = case.shared // CHUNK, len(case.tables)
    expected = attend(case, plan_of(case, [99] * count), device)
    tolerance = {FP32: 3e-6, BF16: 1.6e-2, FP16: 2e-3}[dtype]
    torch.testing.assert_close(expected.double(), exact(case, 0.125), rtol=0, atol=tolerance)
    assert stem and max(case.lengths) > (stem + 1) * CHUNK  # several chunks, shared and own
    on_device = functools.partial(attend, device=device)
    every = 3 if INTERPRETED else 1
    assert same_bits(one_by_one(case, on_device, every), expected[::every])
    splits = [[stem] * count, [0] * count]
    if not INTERPRETED:
        splits.append([stem, 1, 2, 99, 0, stem][:count])
    for split_at in splits:
        assert same_bits(attend(case, plan_of(case, split_at), device), expected), split_at
    if INTERPRETED:  # each block size is another compiled kernel: nothing is promised of two
        other = make_case(seed, dtype, 8, heads, kv_heads, **options)
        assert same_bits(attend(other, plan_of(other, [stem] * count), device), expected)


@pytest.mark.usefixtures("short_chunks")
def test_the_planners_plans_give_the_same_bits_at_any_cost(device: torch.device) -> None:
    case = make_case(33, FP32, 16, 4, 2, head_dim=64, chunk=CHUNK, max_sequences=3, max_rows=4)
    expected = attend(case, plan_of(case, [99] * len(case.tables)), device)
    shared = case.shared // 16
    node = Node(None, case.tables[0][:shared], 0)
    plans = set()
    for overhead, limit in ((0, None), (1 << 40, None), (0, CHUNK)):
        leaves = [
            PlanLeaf(node, table[shared:], length, length - first)
            for table, first, length in zip(case.tables, case.first_rows, case.lengths, strict=True)
        ]
        costs = PlanCosts(64, 1, 0, overhead, limit)
        plan = AttentionPlanner(16, costs, chunk_tokens=CHUNK).plan(leaves)
        plans.add((plan.num_groups, len(plan.group_rows)))
        assert same_bits(attend(case, plan, device), expected)
    assert len(plans) > 1


@pytest.mark.usefixtures("short_chunks")
def test_a_graph_plan_serves_one_plan_after_another_with_the_same_bits(
    device: torch.device,
) -> None:
    graph = new_graph_plan(32, 512, 2, 64, BF16, device, in_chunks=True)
    assert graph.tiles == (fixed_chunks.fixed_tile(2, 64, BF16),)
    for seed, split in ((33, 0), (20, 1)):
        case = make_case(
            seed, BF16, 16, 4, 2, head_dim=64, chunk=CHUNK, max_sequences=3, max_rows=2
        )
        plan = plan_of(case, [split] * len(case.tables))
        assert graph.tile_for(plan) == graph.tiles[0]
        graph.write(plan, graph.tiles[0])
        expected = attend(case, plan, device)
        found = attend(case, graph, device)
        assert same_bits(found, expected)
    with pytest.raises(AssertionError):
        graph.write(dataclasses.replace(plan, chunk_tokens=0))


def test_chunks_of_256_tokens(device: torch.device) -> None:
    assert self_check.is_attention_own(2, 1, 64, 16, BF16, device, num_rows=3)


@pytest.mark.usefixtures("short_chunks")
@pytest.mark.parametrize("programs", [7] if INTERPRETED else [1, 7, 100])
def test_bits_do_not_depend_on_the_number_of_programs(
    programs: int, monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    case = make_case(20, BF16, 16, 4, 2, head_dim=64, chunk=CHUNK, max_sequences=3, max_rows=2)
    plan = plan_of(case, [case.shared // CHUNK] * len(case.tables))
    expected = attend(case, plan, device)
    monkeypatch.setattr(attention_launch, "num_processors", lambda _: programs)
    monkeypatch.setattr(attention_launch, "programs_per_processor", lambda _: 1)
    assert same_bits(attend(case, plan, device), expected)


def test_what_depends_on_the_batch_is_found() -> None:
    rows = torch.randn(20, 3)
    assert self_check.is_own(lambda x: 2 * x, rows)
    assert not self_check.is_own(lambda x: x * len(x), rows)
    assert not self_check.is_own(lambda x: x + torch.arange(len(x))[:, None] // 12, rows)
    assert not self_check.is_own(lambda x: x + x.mean(), rows)


def test_plans_that_are_not_made_of_chunks_are_refused(device: torch.device) -> None:
    case = make_case(8, FP32, 16, 2, 1, head_dim=64, max_sequences=1, max_rows=1)
    plan = plan_of(case, [0])
    for change in ({"group_start": plan.group_start + 16}, {"chunk_tokens": 128}):
        with pytest.raises(ValueError, match="chunk"):
            attend(case, dataclasses.replace(plan, **change), device)


def test_items_of_a_deterministic_plan_have_one_tile(device: torch.device) -> None:
    case = make_case(8, FP32, 16, 4, 2, head_dim=64)
    plan = plan_of(case, [1] * len(case.tables))
    from cotrt.kernels.triton.attention_work import capacity_for

    work = AttentionWork(capacity_for(plan, 2, 32, 32), 2, 32, device, one_tile=True)
    work.write(plan)
    items = work.items[: work.num_items * 8].cpu().numpy().reshape(-1, 8)
    assert not items[:, 5].any() and items[:, 4].max() <= 16
    slots = [np.arange(first, first + rows) for first, rows in items[:, 3:5]]
    assert sorted(np.concatenate(slots)) == list(range(len(plan.group_rows)))


# The whole LLM, whose contexts are of three chunks.

LONG = 1 if INTERPRETED else 16
LLM_CHUNK = 16 * LONG
OPTIONS: dict[str, Any] = {
    "attention_backend": "triton",
    "deterministic": True,
    "max_model_len": 64 * LONG,
    "max_num_seqs": 3,
    "max_num_batched_tokens": 24 * LONG,
    "block_size": 8,
    "kv_cache_memory_bytes": 1 << 22,
}
PROMPTS = [
    random_ids(20 * LONG, seed=4, vocab_size=61) + random_ids(n * LONG, seed=n, vocab_size=61)
    for n in (3, 9, 14)
]
PARAMS = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, logprobs=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    small: dict[str, int] = {
        "hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1,
        "intermediate_size": 32, "vocab_size": 61,
        "max_position_embeddings": 1024,
    }  # fmt: skip
    model = make_model("llama", head_dim=128, num_hidden_layers=1, **small)
    return save(model, tmp_path_factory.mktemp("model"))


def bits(completion: Any) -> list[Any]:
    """Tokens and the bits of their logprobs."""
    return [
        [(t, np.float32(e.logprob).tobytes()) for t, e in entries.items()]
        for entries in completion.logprobs
    ]


def generate(llm: LLM, prompts: list[list[int]]) -> list[list[Any]]:
    return [bits(out.outputs[0]) for out in llm.generate(prompts, PARAMS, use_tqdm=False)]


@pytest.mark.parametrize("dtype", ["float32"] if INTERPRETED else ["float32", "bfloat16"])
def test_a_batch_equals_its_members_alone(
    dtype: str, folder: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each prompt from scratch; all with what they share, as CUDA graphs; in too small a pool."""
    for module in ("cotrt.kernels.triton.fixed_chunks", "cotrt.engine.engine"):
        monkeypatch.setattr(f"{module}.CHUNK_TOKENS", LLM_CHUNK)
    options = {**OPTIONS, "dtype": dtype, "device": str(device)}
    with LLM(folder, **options, enable_prefix_caching=False) as llm:
        alone = [generate(llm, [prompt])[0] for prompt in PROMPTS]
        token_bytes = llm._runtime.engine.model.kv_bytes_per_token
    small = {"max_num_batched_tokens": 17 * LONG, "enable_prefix_caching": False}
    small["kv_cache_memory_bytes"] = 72 * LONG * token_bytes
    with LLM(folder, **{**options, **small, "swap_space": 0 if LONG > 1 else None}) as llm:
        branches = [llm.branch(prompt) for prompt in PROMPTS]
        running = [
            b.generate(max_tokens=3, temperature=0, ignore_eos=True, logprobs=2) for b in branches
        ]
        assert [bits(handle.result()) for handle in running] == alone
        branches[0].generate(max_tokens=1).result()
        assert llm.metrics["recomputed_tokens"] > 0
    if device.type == "cpu":
        from fake_graphs import FakeGraphMaker

        warm_up = functools.partialmethod(Decoder.warm_up, maker=FakeGraphMaker())
        monkeypatch.setattr(Decoder, "warm_up", warm_up)
    with LLM(folder, **options | {"max_num_seqs": 2}) as llm:
        assert llm.kernels == "triton"
        assert generate(llm, PROMPTS) == alone
        model: Any = llm._runtime.engine.model
        assert model.graphs.num_replays >= 1
        assert "triton" in model.computed_under


def test_quantization_and_plain_torch_are_refused_by_name(
    folder: Path, monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    from cotrt.errors import InvalidRequestError
    from cotrt.kernels import dispatch
    from cotrt.models.config import ModelConfig
    from cotrt.models.decoder import DecoderWeights
    from cotrt.models.deterministic import deterministic_backend

    with pytest.raises(InvalidRequestError, match="quantization='int8' needs the native CPU"):
        models.load(
            folder,
            quantization="int8",
            deterministic=True,
            attention_backend="triton",
            device=str(device),
        )

    class OnGpu:
        device = torch.device("cuda")

    weights = DecoderWeights(embed=OnGpu(), layers=[], norm=OnGpu(), head=OnGpu())  # type: ignore[arg-type]
    plain = dispatch.choose("cuda", torch.float32, 72, 16, "reference")
    config = ModelConfig.from_folder(folder)
    with pytest.raises(InvalidRequestError, match="deterministic=True.*needs the Triton kernels"):
        deterministic_backend(plain, config, weights, 16)
