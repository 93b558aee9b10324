"""Tiny random checkpoints, made by transformers, and a harness that drives a Decoder by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cotrt.kernels import dispatch
from cotrt.models.config import ModelConfig
from cotrt.models.decoder import Decoder, DecoderWeights
from cotrt.models.weights import check_tensors, open_weights
from cotrt.plan import AttentionPlan, StepPlan

BASE = {
    "vocab_size": 203,  # not a multiple of anything
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def make_model(family: str, *, seed: int = 0, std: float = 0.3, **settings: Any) -> Any:
    """A random transformers model whose logits depend on every position."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    config = AutoConfig.for_model(family, **{**BASE, **settings})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.copy_(1 + 0.1 * torch.randn_like(parameter))
            else:
                parameter.copy_(std * torch.randn_like(parameter))
        if model.config.tie_word_embeddings:
            model.tie_weights()
    return model


def save(model: Any, folder: Path, **config_edits: Any) -> Path:
    """Save a model; edit its config.json: a value of None removes a key."""
    model.save_pretrained(folder)
    edit_config(folder, **config_edits)
    return folder


def edit_config(folder: Path, **edits: Any) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    for key, value in edits.items():
        config.pop(key, None)
        if value is not None:
            config[key] = value
    path.write_text(json.dumps(config))


def open_decoder(folder: Path, dtype: torch.dtype = torch.float32) -> Decoder:
    config = ModelConfig.from_folder(folder)
    source = open_weights(folder)
    check_tensors(source, config, str(folder))
    weights = DecoderWeights.from_source(source, config, dtype, "cpu")
    source.close()
    backend = dispatch.choose("cpu", dtype, config.head_dim, 16, "reference")
    return Decoder(config, weights, backend)


class Sequences:
    """Hand-made plans: every sequence has its own blocks and one group a step."""

    def __init__(self, decoder: Any, max_len: int, num: int, block_size: int = 16) -> None:
        self.decoder, self.block_size = decoder, block_size
        self.blocks_each = -(-max_len // block_size)
        decoder.allocate_kv(num * self.blocks_each, block_size)
        # Blocks are shuffled, so that nothing works by lying in order.
        self.tables = np.random.default_rng(0).permutation(num * self.blocks_each)
        self.tables = self.tables.reshape(num, self.blocks_each)
        self.lengths = [0] * num

    def step(
        self, work: list[tuple[int, list[int]]], *, all_rows: bool = True, last_rows: Any = None
    ) -> torch.Tensor:
        """Append tokens to sequences; logits of all rows, of each sequence's last, or as given."""
        ids, positions, slots, groups, rows, row_ends = [], [], [], [], [], []
        lens, row_offsets, block_offsets = [], [0], [0]
        for sequence, tokens in work:
            table = self.tables[sequence]
            for token in tokens:
                position = self.lengths[sequence]
                ids.append(token)
                positions.append(position)
                block = int(table[position // self.block_size])
                slots.append(block * self.block_size + position % self.block_size)
                rows.append(len(rows))
                self.lengths[sequence] += 1
            groups += list(table[: -(-self.lengths[sequence] // self.block_size)])
            lens.append(self.lengths[sequence])
            row_offsets.append(len(rows))
            block_offsets.append(len(groups))
            row_ends.append(len(rows) - 1)

        def array(values: Any, dtype: Any = np.int32) -> Any:
            return np.asarray(values, dtype=dtype)

        num = len(rows)
        wanted = row_ends if last_rows is None else last_rows
        attention = AttentionPlan(
            block_size=self.block_size,
            query_positions=array(positions),
            group_blocks=array(groups),
            group_block_offsets=array(block_offsets),
            group_start=array([0] * len(work)),
            group_len=array(lens),
            group_rows=array(rows),
            group_row_offsets=array(row_offsets),
            group_causal=array([1] * len(work)),
            row_partials=array([-1] * num),
            row_partial_offsets=array(range(num + 1)),
        )
        plan = StepPlan(
            input_ids=array(ids),
            positions=array(positions),
            slot_mapping=array(slots, np.int64),
            copies=(),
            attention=attention,
            logits_rows=array(rows if all_rows and last_rows is None else wanted),
            sample_rows=array([]),
        )
        return self.decoder.run(plan)


def prompt_logits(decoder: Any, prompts: list[list[int]], budget: int = 10_000) -> list[Any]:
    """Logits of every position, prompts computed in chunks of ``budget`` tokens in all."""
    num = len(prompts)
    sequences = Sequences(decoder, max(map(len, prompts)) + 1, num)
    out: list[list[torch.Tensor]] = [[] for _ in prompts]
    done = [0] * num
    while any(done[i] < len(prompts[i]) for i in range(num)):
        left, work = budget, []
        for i, prompt in enumerate(prompts):
            take = min(left, len(prompt) - done[i])
            if take:
                work.append((i, prompt[done[i] : done[i] + take]))
                done[i] += take
                left -= take
        logits = sequences.step(work)
        for (i, _), part in zip(work, logits.split([len(t) for _, t in work]), strict=True):
            out[i].append(part)
    return [torch.cat(parts) for parts in out]


def greedy(decoder: Any, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    sequences = Sequences(decoder, max(map(len, prompts)) + num_tokens, len(prompts))
    logits = sequences.step(list(enumerate(prompts)), all_rows=False)
    out = [[int(i)] for i in logits.argmax(-1)]
    for _ in range(num_tokens - 1):
        logits = sequences.step([(i, [o[-1]]) for i, o in enumerate(out)], all_rows=False)
        for tokens, best in zip(out, logits.argmax(-1), strict=True):
            tokens.append(int(best))
    return out


def random_ids(num: int, vocab_size: int = 203, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(3, vocab_size, num).tolist()
