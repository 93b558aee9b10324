"""The whole LLM on the Triton kernels, in the interpreter or on a GPU: the reference's tokens."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_model, random_ids, save

from cotrt import LLM
from cotrt.models.decoder import Decoder

OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 128,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 24,
    "kv_cache_memory_bytes": 1 << 20,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = make_model("llama", head_dim=64, num_hidden_layers=1)
    return save(model, tmp_path_factory.mktemp("model"))


def program(llm: LLM) -> tuple[list[list[int]], list[float]]:
    """A chunked prompt, a fork, plain and filtered draws, penalties, a forced extension, a prune.

    Returns:
        Tokens, and log-probabilities of all kinds.
    """
    with llm.branch(random_ids(30, seed=4)) as root:
        first = root.generate(max_tokens=2, temperature=0, ignore_eos=True).result()
        one, two, three = root.fork(3)
        running = [
            one.generate(max_tokens=5, temperature=0.9, ignore_eos=True),
            two.generate(max_tokens=4, temperature=1.1, top_k=20, top_p=0.9, ignore_eos=True),
            three.generate(
                max_tokens=5, temperature=0.8, min_p=0.01, frequency_penalty=0.5, ignore_eos=True
            ),
        ]
        grown = [generation.result() for generation in running]
        grown.append(
            three.generate(
                max_tokens=2, temperature=0.8, repetition_penalty=1.3, logprobs=2, ignore_eos=True
            ).result()
        )
        two.prune()
        one.extend([7, 8, 9])
        last = one.generate(max_tokens=2, temperature=0, ignore_eos=True).result()
        scores = three.score([[5, 6], [11]], given=[4]).result()
    outputs = (first, *grown, last)
    values = [output.cumulative_logprob for output in outputs]
    return [list(o.token_ids) for o in outputs], values + [v for s in scores for v in s.logprobs]


def check(found: Any, expected: Any) -> None:
    assert found[0] == expected[0]
    assert found[1] == pytest.approx(expected[1], abs=0.01)


@pytest.fixture(scope="module")
def expected(folder: Path) -> Any:
    with LLM(folder, device="cpu", attention_backend="reference", **OPTIONS) as llm:
        return program(llm)


def test_a_program_gives_what_the_reference_gives(
    folder: Path, device: torch.device, expected: Any
) -> None:
    with LLM(folder, device=str(device), attention_backend="triton", **OPTIONS) as llm:
        assert llm.kernels == "triton"
        engine: Any = llm._runtime.engine
        ahead, plain = [], engine.scheduler.decode.ahead
        engine.scheduler.decode.ahead = lambda step: ahead.append(plain(step)) or ahead[-1]
        check(program(llm), expected)
        assert sum(step is not None for step in ahead) >= 2, "steps run behind the host"
        assert engine.model.sample._edits is not None, "penalties are counted on the device"


def test_and_so_it_does_with_graphs(
    folder: Path, device: torch.device, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device.type == "cpu":
        from fake_graphs import FakeGraphMaker

        warm_up = functools.partialmethod(Decoder.warm_up, maker=FakeGraphMaker())
        monkeypatch.setattr(Decoder, "warm_up", warm_up)
    with LLM(folder, device=str(device), attention_backend="triton", **OPTIONS) as llm:
        check(program(llm), expected)
        model: Any = llm._runtime.engine.model
        assert model.graphs.num_replays >= 6
