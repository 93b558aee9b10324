"""A whole decoder on the Triton kernels against the same one on the reference."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoints import make_model, prompt_logits, random_ids, save

from cotrt.errors import InvalidRequestError
from cotrt.kernels import dispatch
from cotrt.models.config import ModelConfig
from cotrt.models.decoder import Decoder, DecoderWeights
from cotrt.models.weights import open_weights


def open_on(backend: str, folder: Path, device: torch.device) -> Decoder:
    config = ModelConfig.from_folder(folder)
    source = open_weights(folder)
    where = str(device) if backend == "triton" else "cpu"
    weights = DecoderWeights.from_source(source, config, torch.float32, where)
    source.close()
    chosen = dispatch.choose(where, torch.float32, config.head_dim, 16, backend)
    assert chosen.name == backend
    return Decoder(config, weights, chosen)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_prompt_logits_are_the_references(family: str, tmp_path: Path, device: torch.device):
    model = make_model(family, head_dim=64, num_hidden_layers=2)
    folder = save(model, tmp_path)
    prompts = [random_ids(19, seed=1), random_ids(5, seed=2), random_ids(1, seed=3)]
    expected = prompt_logits(open_on("reference", folder, device), prompts, budget=12)
    found = prompt_logits(open_on("triton", folder, device), prompts, budget=12)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(
            torch.log_softmax(one.cpu(), -1), torch.log_softmax(other, -1), rtol=0, atol=1e-3
        )


def test_what_the_kernels_cannot_serve_is_said(device: torch.device):
    for head_dim, block_size, words in ((72, 16, "head_dim 72"), (64, 24, "block_size 24")):
        with pytest.raises(InvalidRequestError, match=words):
            dispatch.choose(str(device), torch.float16, head_dim, block_size, "triton")
    with pytest.raises(InvalidRequestError, match="float64"):
        dispatch.choose(str(device), torch.float64, 64, 16, "triton")
