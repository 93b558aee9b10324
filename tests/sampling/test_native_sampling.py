"""The sampler over the native kernel gives what it gives over the reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from sampling_helpers import make_batch

from cotrt.kernels.cpu import support
from cotrt.options.sampling import SamplingParams
from cotrt.sampling.processors import LogitsProcessor
from cotrt.sampling.sampler import kernel_for, sample_batch

pytestmark = pytest.mark.skipif(
    support.refusal("cpu", torch.float32, 64, 16) is not None,
    reason="the native kernels are not built here",
)


def logits_and_fields() -> tuple[torch.Tensor, dict[str, Any]]:
    rng = np.random.default_rng(0)
    logits = torch.from_numpy(rng.normal(size=(6, 3000)).astype(np.float32) * 3)
    fields = {
        "rows": rng.integers(0, 6, 40),
        "temperature": rng.choice([0.0, 0.7, 1.0, 1.6], 40),
        "top_k": rng.choice([0, 0, 5, 100], 40),
        "top_p": rng.choice([1.0, 1.0, 0.9], 40),
        "min_p": rng.choice([0.0, 0.0, 0.03], 40),
        "seeds": np.arange(40),
        "positions": rng.integers(0, 1000, 40),
        "num_logprobs": rng.choice([-1, 0, 4], 40),
    }
    return logits, fields


@pytest.mark.parametrize("with_processors", [False, True])
def test_equal_to_the_reference(with_processors: bool) -> None:
    logits, fields = logits_and_fields()
    logits[3, 7] = torch.nan
    if with_processors:
        built = LogitsProcessor.build(
            SamplingParams(
                presence_penalty=1.0, logit_bias={5: 3.0}, allowed_token_ids=range_of(9)
            ),
            vocab_size=3000,
            eos_token_ids=[],
            tokenizer=None,
        )
        assert built is not None
        fields["processors"] = [None if i % 3 else built.bind([], [i]) for i in range(40)]
    batch = make_batch(40, **fields)
    kernel = kernel_for("cpu")
    assert kernel is not None
    expected, found = sample_batch(logits, batch), sample_batch(logits, batch, kernel)
    assert found.token_ids.tolist() == expected.token_ids.tolist()
    assert found.bad.tolist() == expected.bad.tolist() and found.bad.any()
    good = ~found.bad
    assert np.allclose(found.logprobs[good], expected.logprobs[good], atol=1e-4)
    assert sorted(found.top) == sorted(expected.top)
    for draw, top in expected.top.items():
        assert found.top[draw].ids.tolist() == top.ids.tolist()
        assert found.top[draw].rank == top.rank


def range_of(first: int) -> list[int]:
    return list(range(first, 3000))


def test_other_backends_draw_by_the_reference() -> None:
    assert kernel_for("reference") is None and kernel_for("scripted") is None
