""".gguf files: their tensors to the bit, and their models as the checkpoints they came from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from checkpoints import make_model, prompt_logits, random_ids
from foreign_code import KNOWN, UNKNOWN, add_code, never_ran
from tokens import TEMPLATE

from cotrt.errors import ModelLoadError
from cotrt.models import load
from cotrt.models.config import ModelConfig
from cotrt.models.gguf import GgufSource
from cotrt.models.weights import fingerprint

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def permute(values: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """As llama.cpp's converter stores q and k of a llama."""
    rows = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
    return rows.swapaxes(1, 2).reshape(values.shape)


def write(model: Any, path: Path, kind: str = "F32", **more: Any) -> Path:
    """A transformers model as a .gguf file."""
    config, arch = model.config, model.config.model_type
    names = {**NAMES, "model.embed_tokens": more.pop("embedding", "token_embd")}
    writer = gguf.GGUFWriter(str(path), arch, split_max_tensors=more.pop("most", 0))
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    head_dim = getattr(config, "head_dim", None) or 16
    writer.add_key_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    tokens = [f"<0x{i:02X}>" if i >= 3 else ("<unk>", "<s>", "</s>")[i] for i in range(203)]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * len(tokens))
    writer.add_token_types([2, 3, 3, *[6] * 200])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(7)
    writer.add_chat_template(TEMPLATE)
    for call, value in more.items():
        if call != "rope_freqs":
            getattr(writer, call)(value)
        else:
            writer.add_tensor("rope_freqs.weight", np.asarray(value, np.float32))
    for name, parameter in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = parameter.float().numpy()
        if arch == "llama" and ".q_proj" in name:
            values = permute(values, config.num_attention_heads)
        if arch == "llama" and ".k_proj" in name:
            values = permute(values, config.num_key_value_heads)
        stem, suffix = name.rsplit(".", 1)
        if stem.startswith("model.layers."):
            index, role = stem.removeprefix("model.layers.").split(".", 1)
            stored = f"blk.{index}.{names[role]}.{suffix}"
        else:
            stored = f"{names[stem]}.{suffix}"
        quantised = kind != "F32" and values.ndim == 2
        if quantised:
            type_ = gguf.GGMLQuantizationType[kind]
            writer.add_tensor(stored, gguf.quants.quantize(values, type_), raw_dtype=type_)
        else:
            writer.add_tensor(stored, np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def reference(model: Any, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].log_softmax(-1)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_1"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_tensors_equal_those_of_transformers_to_the_bit(
    family: str, kind: str, tmp_path: Path
) -> None:
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    model = make_model(family, head_dim=32)
    path = write(model, tmp_path / "model.gguf", kind)
    loaded = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
    source = GgufSource(path)
    assert set(source.names()) == set(loaded)
    for name, tensor in loaded.items():
        assert source.shape(name) == tuple(tensor.shape)
        assert torch.equal(source.get(name), tensor), name
    source.close()


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
        ("llama", {"attention_bias": True}),
        ("qwen2", {}),
        ("qwen3", {"head_dim": 32}),
    ],
)
def test_a_gguf_file_computes_what_its_checkpoint_computes(
    family: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    model = make_model(family, **settings)
    path = write(model, tmp_path / "model.gguf")
    loaded = load(path, attention_backend="reference")
    assert loaded.model.dtype == torch.float32
    assert loaded.eos_token_ids == {2, 7}
    assert loaded.tokenizer is not None and loaded.tokenizer.has_chat_template
    assert loaded.tokenizer.bos_token_id == 1
    ids = random_ids(60)
    got = prompt_logits(loaded.model, [ids])[0].log_softmax(-1)
    assert (got - reference(model, ids)).abs().max() < 1e-3


def test_quantised_weights_are_served_in_bfloat16_unless_told_otherwise(tmp_path: Path) -> None:
    path = write(make_model("llama"), tmp_path / "model.gguf", "Q8_0")
    assert load(path).model.dtype == torch.bfloat16
    assert load(path, dtype="float32").model.dtype == torch.float32


def test_the_frequency_factors_of_a_stretched_llama_are_not_dropped(tmp_path: Path) -> None:
    """llama.cpp stores llama3 scaling as one divisor a frequency."""
    rope = {
        "rope_type": "llama3",
        "rope_theta": 1e4,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    model = make_model("llama", rope_parameters=rope)
    scaled = model.model.rotary_emb.inv_freq
    plain = 1.0 / (1e4 ** (torch.arange(0, 16, 2).float() / 16))
    path = write(model, tmp_path / "model.gguf", rope_freqs=(plain / scaled).tolist())
    ids = random_ids(200)
    got = prompt_logits(load(path, attention_backend="reference").model, [ids])[0].log_softmax(-1)
    assert (got - reference(model, ids)).abs().max() < 1e-3


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_rope_scaling_of_a_gguf_file_is_honoured(kind: str, tmp_path: Path) -> None:
    rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0}
    more: dict[str, Any] = {
        "add_rope_scaling_type": gguf.RopeScalingType(kind),
        "add_rope_scaling_factor": 4.0,
    }
    if kind == "yarn":
        rope["original_max_position_embeddings"] = 64
        more["add_rope_scaling_orig_ctx_len"] = 64
    model = make_model("llama", rope_parameters=rope)
    path = write(model, tmp_path / "model.gguf", **more)
    ids = random_ids(200)
    got = prompt_logits(load(path, attention_backend="reference").model, [ids])[0].log_softmax(-1)
    assert (got - reference(model, ids)).abs().max() < 1e-3


def test_a_folder_with_a_gguf_file_only_says_to_give_the_file(tmp_path: Path) -> None:
    write(make_model("llama"), tmp_path / "model.gguf")
    (tmp_path / "config.json").write_text(
        '{"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 203,'
        ' "intermediate_size": 96, "num_hidden_layers": 2}'
    )
    with pytest.raises(ModelLoadError, match=r"give the path of its \.gguf file: model\.gguf"):
        load(tmp_path)


@pytest.mark.parametrize("cut", [0, 3, 200, -100])
def test_a_damaged_gguf_file_is_named(cut: int, tmp_path: Path) -> None:
    path = write(make_model("llama"), tmp_path / "model.gguf")
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(ModelLoadError, match="is not a whole GGUF file"):
        load(path)


def test_a_file_that_is_no_gguf_and_another_architecture_are_refused(tmp_path: Path) -> None:
    other = tmp_path / "other.gguf"
    writer = gguf.GGUFWriter(str(other), "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelLoadError, match="architecture 'mamba' is not supported"):
        load(other)
    text = tmp_path / "notes.txt"
    text.write_text("x")
    with pytest.raises(ModelLoadError, match=r"is a file but no \.gguf"):
        load(text)
    with pytest.raises(ModelLoadError, match="does not exist"):
        load(tmp_path / "missing.gguf")


def test_a_gguf_file_beside_code(tmp_path: Path) -> None:
    """What lies in its folder is read, and code that is named there never runs."""
    path = write(make_model("llama"), tmp_path / "model.gguf")
    mark = add_code(tmp_path, **KNOWN)
    loaded = load(path)
    assert loaded.tokenizer is not None and loaded.tokenizer.bos_token_id == 1
    assert never_ran(mark)


def test_a_gguf_file_beside_a_tokenizer_that_is_code_alone_is_refused(tmp_path: Path) -> None:
    path = write(make_model("llama"), tmp_path / "model.gguf")
    mark = add_code(tmp_path, **UNKNOWN)
    with pytest.raises(ModelLoadError, match="its tokenizer cannot be read"):
        load(path)
    assert never_ran(mark)


def test_every_byte_of_a_file_decides_its_fingerprint(tmp_path: Path) -> None:
    path = write(make_model("llama", head_dim=32), tmp_path / "model.gguf", "Q8_0")

    def mark() -> str:
        source = GgufSource(path)
        found = fingerprint(source, ModelConfig.from_dict(source.config(), "model"))
        source.close()
        return found

    before = mark()
    assert mark() == before
    data = bytearray(path.read_bytes())
    data[-1000] ^= 1
    path.write_bytes(data)
    assert mark() != before


def split(folder: Path, name: str = "tiny", **settings: Any) -> list[Path]:
    write(make_model("llama", head_dim=32, **settings), folder / f"{name}.gguf", most=9)
    return sorted(folder.glob(f"{name}-*.gguf"))


def test_a_split_file_is_read_whole_from_any_part(tmp_path: Path) -> None:
    whole = GgufSource(write(make_model("llama", head_dim=32), tmp_path / "whole.gguf"))
    parts = split(tmp_path)
    assert len(parts) > 2
    for part in parts:
        source = GgufSource(part)
        assert source.files() == parts
        assert source.config() == whole.config()
        assert set(source.names()) == set(whole.names())
        assert all(torch.equal(source.get(n), whole.get(n)) for n in whole.names())
        assert load(part).tokenizer is not None
        source.close()


def test_parts_that_are_not_all_there_or_not_of_one_model_are_named(tmp_path: Path) -> None:
    parts = split(tmp_path)
    other = split(tmp_path, "other", num_hidden_layers=3)
    second = parts[1].read_bytes()
    parts[1].unlink()
    with pytest.raises(ModelLoadError, match=f"{parts[1].name} is not beside it"):
        GgufSource(parts[0])
    parts[1].write_bytes(parts[2].read_bytes())
    with pytest.raises(ModelLoadError, match="is not part 2 of"):
        GgufSource(parts[0])
    parts[1].write_bytes(other[1].read_bytes())
    with pytest.raises(ModelLoadError, match="split model"):
        GgufSource(parts[0])
    parts[1].write_bytes(second)
    renamed = parts[0].rename(tmp_path / "first.gguf")
    with pytest.raises(ModelLoadError, match="its name does not say which"):
        GgufSource(renamed)


def test_a_matrix_that_serves_as_head_and_embedding_may_have_either_name(tmp_path: Path) -> None:
    model = make_model("llama", head_dim=32, tie_word_embeddings=True)
    embedded = load(write(model, tmp_path / "embedding.gguf")).model
    headed = load(write(model, tmp_path / "head.gguf", embedding="output")).model
    assert embedded.weight_bytes == headed.weight_bytes
