"""Every family, rope style and config quirk computes what transformers computes, in float32."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import (
    edit_config,
    greedy,
    make_model,
    open_decoder,
    prompt_logits,
    random_ids,
    save,
)

from cotrt.errors import InvalidRequestError, ModelLoadError
from cotrt.models import load
from cotrt.models.config import ModelConfig

TOLERANCE = 1e-3  # of logprobs; both sides are float32, orders of summation differ

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 5e5},
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    "llama3": LLAMA3,
    "yarn": YARN,
    "yarn with attention_factor": {**YARN, "attention_factor": 0.7},
    "yarn with betas": {**YARN, "beta_fast": 16.0, "beta_slow": 2.0, "truncate": False},
    "yarn with mscale": {**YARN, "mscale": 1.2, "mscale_all_dim": 0.8},
}
QUIRKS: dict[str, tuple[str, dict[str, Any]]] = {
    "explicit head_dim": ("qwen3", {"head_dim": 32}),
    "explicit head_dim in llama": ("llama", {"head_dim": 24}),
    "biases everywhere": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "qwen3 with biases": ("qwen3", {"head_dim": 16, "attention_bias": True}),
    "qkv bias of qwen2": ("qwen2", {}),
    "tied head": ("llama", {"tie_word_embeddings": True}),
    "one KV head": ("llama", {"num_key_value_heads": 1}),
    "as many KV heads": ("mistral", {"num_key_value_heads": 4, "sliding_window": None}),
    "coarse eps": ("llama", {"rms_norm_eps": 1e-2}),
    "window unused": ("qwen2", {"sliding_window": 8, "use_sliding_window": False}),
    "window of no layer": (
        "qwen2",
        {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 2},
    ),
    "window longer than the prompt": ("mistral", {"sliding_window": 400}),
}


def reference(model: Any, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].log_softmax(-1)


def assert_same_greedy(model: Any, ids: list[int], got: list[int]) -> None:
    """Equal, or first different where the two best logits are within 1e-4."""
    logits = reference(model, ids + got)[len(ids) - 1 : -1]
    for row, token in zip(logits, got, strict=True):
        best = row.topk(2)
        if int(best.indices[0]) != token:
            assert token == int(best.indices[1])
            assert float(best.values[0] - best.values[1]) < 1e-4
            return


@pytest.mark.parametrize("rope", ROPES, ids=list(ROPES))
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("style", ["newer", "older"])
def test_every_family_and_rope_style_has_the_logprobs_of_transformers(
    family: str, rope: str, style: str, tmp_path: Path
) -> None:
    settings = {"sliding_window": None} if family == "mistral" else {}
    if family == "qwen3":
        settings = {"head_dim": 16}
    model = make_model(family, rope_parameters=dict(ROPES[rope]), **settings)
    save(model, tmp_path)
    if style == "older":
        config = older(ROPES[rope])
        if rope == "linear":  # the oldest spelling of the key
            config["rope_scaling"]["type"] = config["rope_scaling"].pop("rope_type")
        if rope == "default":
            config["rope_scaling"] = None
        edit_config(tmp_path, **config)
    decoder = open_decoder(tmp_path)
    ids = random_ids(300)
    expected = reference(model, ids)
    for budget in (1000, 64):
        got = prompt_logits(decoder, [ids], budget)[0].log_softmax(-1)
        assert (got - expected).abs().max() < TOLERANCE


@pytest.mark.parametrize("quirk", QUIRKS, ids=list(QUIRKS))
def test_config_quirks_prefill_and_decode_as_transformers(quirk: str, tmp_path: Path) -> None:
    family, settings = QUIRKS[quirk]
    model = make_model(family, seed=1, **settings)
    decoder = open_decoder(save(model, tmp_path))
    ids = random_ids(60)
    got = prompt_logits(decoder, [ids])[0].log_softmax(-1)
    assert (got - reference(model, ids)).abs().max() < TOLERANCE
    assert_same_greedy(model, ids, greedy(decoder, [ids], 8)[0])


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_the_native_stack_has_the_logprobs_of_transformers(family: str, tmp_path: Path) -> None:
    from cotrt.kernels.cpu.native import missing_reason

    if missing_reason() is not None:
        pytest.skip(f"no native kernels here: {missing_reason()}")
    model = make_model(family, seed=3, head_dim=32, rope_parameters=dict(LLAMA3))
    loaded = load(save(model, tmp_path))
    assert loaded.model.backend_name == "cpu"
    ids = random_ids(300)
    expected = reference(model, ids)
    for budget in (1000, 64):
        got = prompt_logits(loaded.model, [ids], budget)[0].log_softmax(-1)
        assert (got - expected).abs().max() < TOLERANCE
    prompts = [random_ids(9 + 7 * i, seed=i) for i in range(7)]
    for prompt, got in zip(prompts, greedy(loaded.model, prompts, 16), strict=True):
        assert_same_greedy(model, prompt, got)


def test_the_planner_is_told_what_sharing_costs_here(tmp_path: Path) -> None:
    decoder = open_decoder(save(make_model("llama"), tmp_path))
    options = decoder.plan_options
    assert options["kv_bytes_per_token"] * 2 == decoder.kv_bytes_per_token == 2 * 2 * 2 * 16 * 4
    assert options["partial_bytes_per_row"] == 4 * 17 * 4 * 2


@pytest.mark.parametrize("edit", [{"head_dim": None}, {"head_dim": "null"}], ids=["absent", "null"])
def test_head_dim_absent_or_null_is_hidden_size_over_heads(
    edit: dict[str, Any], tmp_path: Path
) -> None:
    model = make_model("llama")
    save(model, tmp_path, head_dim=None)
    if edit["head_dim"] == "null":
        path = tmp_path / "config.json"
        path.write_text(path.read_text().replace("{", '{"head_dim": null,', 1))
    ids = random_ids(40)
    got = prompt_logits(open_decoder(tmp_path), [ids])[0].log_softmax(-1)
    assert (got - reference(model, ids)).abs().max() < TOLERANCE


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_seven_prompts_at_once_decode_as_each_alone(family: str, tmp_path: Path) -> None:
    model = make_model(family, seed=2, head_dim=32)
    decoder = open_decoder(save(model, tmp_path))
    prompts = [random_ids(5 + 13 * i, seed=i) for i in range(7)]
    for ids, got in zip(prompts, greedy(decoder, prompts, 32), strict=True):
        assert_same_greedy(model, ids, got)
    alone = greedy(decoder, prompts[3:4], 32)[0]
    assert_same_greedy(model, prompts[3], alone)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_about_as_far_from_float32_as_that_of_transformers(
    dtype: str, tmp_path: Path
) -> None:
    model = make_model("llama", std=0.15)
    save(model, tmp_path)
    ids = random_ids(120)
    exact = reference(model, ids)
    loaded = load(tmp_path, dtype=dtype, attention_backend="reference")
    assert loaded.model.dtype == getattr(torch, dtype)
    logits = prompt_logits(loaded.model, [ids])[0]
    assert logits.dtype == torch.float32
    ours = (logits.log_softmax(-1) - exact).abs().mean()
    theirs = (reference(model.to(getattr(torch, dtype)), ids).float() - exact).abs().mean()
    assert ours < 1.2 * theirs


def older(rope: dict[str, Any]) -> dict[str, Any]:
    """Entries of config.json that say `rope` in the older style."""
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    return {"rope_parameters": None, "rope_theta": rope["rope_theta"], "rope_scaling": scaling}


@pytest.mark.parametrize("style", ["newer", "older"])
def test_an_unknown_rope_type_is_refused(style: str, tmp_path: Path) -> None:
    rope = {"rope_type": "spiral", "rope_theta": 1e4}
    config = {"rope_parameters": rope} if style == "newer" else older(rope)
    save(make_model("llama"), tmp_path, **config)
    with pytest.raises(ModelLoadError, match=r"rope type 'spiral' is not supported"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("parameters", "word"),
    [
        ({"rope_type": "linear"}, "factor"),
        ({"rope_type": "llama3", "factor": 8.0}, "low_freq_factor"),
        ({"rope_type": "yarn", "factor": "four"}, "factor"),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_type": "default", "rope_theta": 0}, "rope_theta"),
        ({"full_attention": {"rope_type": "default"}}, "differ by layer"),
    ],
)
def test_rope_settings_that_lack_or_mistake_a_value_are_refused_by_name(
    parameters: dict[str, Any], word: str, tmp_path: Path
) -> None:
    save(make_model("llama"), tmp_path, rope_parameters=parameters)
    with pytest.raises(ModelLoadError, match=word):
        load(tmp_path)


@pytest.mark.parametrize("style", ["newer", "older"])
def test_dynamic_rope_equals_transformers_up_to_the_original_length_and_is_refused_beyond(
    style: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    model = make_model("llama", max_position_embeddings=64, rope_parameters=rope)
    save(model, tmp_path)
    if style == "older":
        edit_config(tmp_path, **older(rope))
    with caplog.at_level(logging.INFO, "cotrt"):
        loaded = load(tmp_path, attention_backend="reference")
    assert loaded.model.max_model_len == 64
    assert "dynamic rope scaling changes the keys" in caplog.text
    ids = random_ids(64)
    got = prompt_logits(loaded.model, [ids])[0].log_softmax(-1)
    assert (got - reference(model, ids)).abs().max() < TOLERANCE
    with pytest.raises(InvalidRequestError, match=r"max_model_len=65 is more than 64.*dynamic"):
        load(tmp_path, max_model_len=65)


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("mistral", {"sliding_window": 40}),
        ("qwen2", {"sliding_window": 40, "use_sliding_window": True, "max_window_layers": 1}),
        ("qwen3", {"sliding_window": 40, "use_sliding_window": True, "max_window_layers": 0}),
    ],
)
def test_a_sliding_window_is_served_up_to_its_length_and_refused_beyond(
    family: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    model = make_model(family, head_dim=16, **settings)
    save(model, tmp_path)
    loaded = load(tmp_path, attention_backend="reference")
    assert loaded.model.max_model_len == 40
    ids = random_ids(40)
    got = prompt_logits(loaded.model, [ids])[0].log_softmax(-1)
    assert (got - reference(model, ids)).abs().max() < TOLERANCE
    with pytest.raises(InvalidRequestError, match="sliding window of 40 tokens"):
        load(tmp_path, max_model_len=41)


def test_a_longer_max_model_len_of_a_model_without_such_a_limit_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(make_model("llama", max_position_embeddings=64), tmp_path)
    assert load(tmp_path, max_model_len=300).model.max_model_len == 300
    assert "max_model_len=300 is more than the 64 tokens" in caplog.text
    assert load(tmp_path, max_model_len=10).model.max_model_len == 10


def test_yarn_reaches_to_the_stretched_length(tmp_path: Path) -> None:
    save(make_model("llama", max_position_embeddings=64, rope_parameters=dict(YARN)), tmp_path)
    assert ModelConfig.from_folder(tmp_path).max_model_len == 256


@pytest.mark.parametrize(
    ("edit", "word"),
    [
        ({"model_type": "bert"}, "model_type 'bert' is not supported"),
        ({"model_type": "mystery", "auto_map": {"AutoModel": "x.Y"}}, "never run"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "not a causal language model"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantised .awq."),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"num_key_value_heads": 3}, "not a multiple"),
        ({"head_dim": 15}, "odd"),
        ({"vocab_size": "many"}, "vocab_size must be a positive integer"),
        ({"hidden_size": None}, "no hidden_size"),
        ({"rms_norm_eps": -1}, "rms_norm_eps"),
    ],
)
def test_a_config_that_cannot_be_served_is_refused_by_name(
    edit: dict[str, Any], word: str, tmp_path: Path
) -> None:
    save(make_model("llama"), tmp_path, **edit)
    with pytest.raises(ModelLoadError, match=word):
        load(tmp_path)


def test_a_step_without_logits_rows_writes_keys_and_values_all_the_same(tmp_path: Path) -> None:
    from checkpoints import Sequences

    model = make_model("llama")
    decoder = open_decoder(save(model, tmp_path))
    ids = random_ids(20)
    sequences = Sequences(decoder, 32, 1)
    assert sequences.step([(0, ids[:-1])], last_rows=()).shape == (0, decoder.vocab_size)
    got = sequences.step([(0, ids[-1:])]).log_softmax(-1)
    assert (got - reference(model, ids)[-1:]).abs().max() < TOLERANCE


def test_a_pool_allocated_again_replaces_the_old_one(tmp_path: Path) -> None:
    decoder = open_decoder(save(make_model("llama"), tmp_path))
    decoder.allocate_kv(4, 16)
    decoder.allocate_kv(7, 8)
    assert len(decoder.kv_caches) == 2
    assert sum(t.numel() * t.itemsize for pair in decoder.kv_caches for t in pair) == (
        7 * 8 * decoder.kv_bytes_per_token
    )
