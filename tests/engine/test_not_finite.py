"""NaN in a model's weights: it ends the sequences that meet it, and debug mode says where it is."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "models"))
from checkpoints import make_model, save

from cotrt import LLM, NumericsError, SamplingParams
from cotrt.kernels.cpu import native

POISON, GOOD = [5, 7, 77], [5, 7, 9]
BACKENDS = ["reference"]
if native.missing_reason() is None:
    BACKENDS.append("cpu")


class _Bytes:
    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: list[int]) -> str:
        return "".join(chr(i) for i in ids)


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(make_model("llama"), tmp_path_factory.mktemp("llama"))


def broken(healthy: Path, folder: Path, name: str, where: int | slice) -> Path:
    """The model with NaN in some rows of one tensor."""
    for path in healthy.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    tensors = load_file(folder / "model.safetensors")
    tensors[name][where] = torch.nan
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def open_llm(folder: Path, backend: str) -> LLM:
    return LLM(
        folder, tokenizer=_Bytes(), dtype="float32", attention_backend=backend,
        kv_cache_memory_bytes=1 << 20,
    )  # fmt: skip


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("name", "where", "said"),
    [
        ("model.embed_tokens.weight", 77, "the embedding"),
        ("model.layers.0.self_attn.v_proj.weight", slice(None), "the attention of layer 0"),
        ("model.layers.1.self_attn.o_proj.weight", 3, "the attention of layer 1"),
        ("model.layers.0.mlp.up_proj.weight", 4, "the MLP of layer 0"),
        ("model.layers.1.mlp.down_proj.weight", 4, "the MLP of layer 1"),
        ("lm_head.weight", 11, "the final norm or the head"),
    ],
)
def test_debug_mode_names_the_first_part_that_gives_nan(
    healthy: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    backend: str,
    name: str,
    where: int | slice,
    said: str,
) -> None:
    monkeypatch.setenv("COTRT_CHECK_LAWS", "1")
    with open_llm(broken(healthy, tmp_path, name, where), backend) as llm:
        for ids in (POISON, POISON * 3):
            with llm.branch(ids) as branch, pytest.raises(NumericsError) as caught:
                branch.generate(max_tokens=3, ignore_eos=True).result()
            assert f"first in {said}:" in str(caught.value)
        with llm.branch(POISON) as branch, pytest.raises(NumericsError, match=said):
            branch.score([[5, 6]]).result()


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_only_the_sequences_that_meet_nan_end(
    healthy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str, debug: bool
) -> None:
    monkeypatch.setenv("COTRT_CHECK_LAWS", "1" if debug else "0")
    params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    with open_llm(healthy, backend) as llm:
        prompts = [{"prompt_token_ids": [*GOOD, i]} for i in range(6)]
        expected = [out.outputs[0].token_ids for out in llm.generate(prompts, params)]
        assert all(77 not in ids for ids in expected)
    folder = broken(healthy, tmp_path, "model.embed_tokens.weight", 77)
    with open_llm(folder, backend) as llm:
        mixed = [*prompts[:3], {"prompt_token_ids": POISON}, *prompts[3:]]
        with pytest.raises(NumericsError) as caught:
            llm.generate(mixed, params)
        outputs = caught.value.outputs
        assert outputs.pop(3) is None
        assert [out.outputs[0].token_ids for out in outputs] == expected
        if not debug:
            assert "COTRT_CHECK_LAWS=1" in str(caught.value)
        # What the poisoned prompt left in the cache harms nobody who shares its beginning.
        with llm.branch([*POISON[:2], 9, 0]) as branch:
            branch.generate(params).result()
