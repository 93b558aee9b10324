"""Options of LLM: types, ranges, what excludes what, and what this version refuses."""

from __future__ import annotations

import inspect
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cotrt.errors import InvalidRequestError
from cotrt.options.engine import EngineConfig


def config(**options: Any) -> EngineConfig:
    return EngineConfig(**{"model": "some/model", **options})


class ModelObject:
    def run(self, step: object) -> None: ...


class TokenizerObject:
    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: list[int]) -> str: ...


def test_defaults_are_those_of_the_contract() -> None:
    assert {
        name: parameter.default
        for name, parameter in inspect.signature(EngineConfig).parameters.items()
        if name != "model"
    } == {
        "tokenizer": None,
        "revision": None,
        "trust_remote_code": False,
        "chat_template": None,
        "generation_config": "auto",
        "dtype": "auto",
        "quantization": None,
        "device": "auto",
        "num_threads": None,
        "seed": 0,
        "max_model_len": None,
        "block_size": 16,
        "kv_cache_dtype": "auto",
        "gpu_memory_utilization": 0.9,
        "kv_cache_memory_bytes": None,
        "swap_space": None,
        "disk_space": 0.0,
        "disk_dir": None,
        "prefix_cache_dir": None,
        "max_num_seqs": 256,
        "max_num_batched_tokens": 2048,
        "enable_prefix_caching": True,
        "attention_backend": "auto",
        "deterministic": False,
        "enforce_eager": False,
        "logprobs_mode": "raw",
        "saved_key": None,
    }


def test_an_unknown_option_is_an_error() -> None:
    with pytest.raises(TypeError, match="max_tokens"):
        config(max_tokens=3)


@pytest.mark.parametrize(
    "options",
    [
        {"model": Path("folder")},
        {"model": ModelObject()},
        {"tokenizer": "folder"},
        {"tokenizer": TokenizerObject()},
        {"revision": "v1", "chat_template": "{{ messages }}"},
        {"generation_config": "vllm"},
        {"seed": -(2**63)},
        {"seed": 2**64 - 1},
        {"block_size": 8},
        {"block_size": 256},
        {"block_size": np.int64(32)},
        {"max_num_seqs": 1, "max_num_batched_tokens": 1},
        {"max_num_batched_tokens": 64},
        {"max_model_len": 1},
        {"kv_cache_memory_bytes": 4 << 30},
        {"disk_space": 0},
        {"disk_space": 1.5, "disk_dir": Path("folder")},
        {"prefix_cache_dir": Path("folder")},
        {"saved_key": b"k" * 16},
        {"saved_key": Path("file")},
        {"prefix_cache_dir": "folder", "disk_space": 1},
        {"swap_space": 4, "device": "cuda"},
        {"gpu_memory_utilization": 1},
        {"swap_space": 4, "device": "auto"},
        {"swap_space": 0, "device": "cuda:1"},
        {"enforce_eager": True, "device": "cuda"},
        {"attention_backend": "reference", "logprobs_mode": "processed"},
        {"enable_prefix_caching": False, "trust_remote_code": False, "num_threads": 2},
    ],
)
def test_allowed(options: dict[str, Any]) -> None:
    config(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": ""}, "model=''"),
        ({"model": None}, "model=None"),
        ({"model": ModelObject}, "model=<class"),
        ({"model": 3}, "model=3"),
        ({"tokenizer": 3}, "tokenizer=3"),
        ({"tokenizer": ""}, "tokenizer=''"),
        ({"revision": ""}, "revision=''"),
        ({"chat_template": 3}, "chat_template=3"),
        ({"trust_remote_code": 1}, "trust_remote_code=1: must be True or False"),
        ({"enable_prefix_caching": None}, "enable_prefix_caching=None"),
        ({"deterministic": "yes"}, "deterministic='yes'"),
        ({"enforce_eager": 0}, "enforce_eager=0"),
        ({"generation_config": "folder"}, "generation_config='folder'.*not in this version"),
        ({"dtype": "int8"}, "dtype='int8'.*bfloat16"),
        ({"dtype": None}, "dtype=None"),
        ({"device": "gpu"}, "device='gpu'"),
        ({"device": "mps"}, "not in this version"),
        ({"device": "cuda:x"}, "device='cuda:x'"),
        ({"device": 0}, "device=0"),
        ({"num_threads": 0}, "num_threads=0"),
        ({"seed": 2**64}, "seed=18446744073709551616"),
        ({"seed": None}, "seed=None"),
        ({"seed": 1.0}, r"seed=1\.0"),
        ({"seed": True}, "seed=True"),
        ({"max_model_len": 0}, "max_model_len=0"),
        ({"max_model_len": "4096"}, "max_model_len='4096'"),
        ({"block_size": 4}, "block_size=4: must be 8 to 256"),
        ({"block_size": 24}, "block_size=24: must be a power of two"),
        ({"block_size": 512}, "block_size=512"),
        ({"gpu_memory_utilization": 0}, "above 0"),
        ({"gpu_memory_utilization": 1.1}, r"gpu_memory_utilization=1\.1"),
        ({"gpu_memory_utilization": math.nan}, "gpu_memory_utilization=nan"),
        ({"gpu_memory_utilization": "0.9"}, r"gpu_memory_utilization='0\.9'"),
        ({"kv_cache_memory_bytes": 0}, "kv_cache_memory_bytes=0"),
        ({"kv_cache_memory_bytes": 1e9}, r"kv_cache_memory_bytes=1000000000\.0"),
        ({"kv_cache_memory_bytes": -1}, "kv_cache_memory_bytes=-1"),
        ({"swap_space": -1}, "swap_space=-1"),
        ({"swap_space": math.inf}, "swap_space=inf"),
        ({"disk_space": None}, "disk_space=None"),
        ({"max_num_seqs": 0}, "max_num_seqs=0"),
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens=0"),
        ({"attention_backend": "flash"}, "attention_backend='flash'.*triton"),
        ({"logprobs_mode": "raw_logprobs"}, "logprobs_mode='raw_logprobs'.*processed"),
        ({"disk_dir": 3, "disk_space": 1}, "disk_dir=3"),
        ({"prefix_cache_dir": "a\0b"}, "must be a folder's path"),
        ({"prefix_cache_dir": ""}, "prefix_cache_dir=''"),
        ({"saved_key": b"short"}, "has 5 bytes"),
        ({"saved_key": ""}, "must be bytes, a file's path or None"),
        ({"saved_key": 7}, "not int"),
        ({"disk_dir": "folder"}, "disk_dir='folder' with disk_space=0"),
        ({"disk_dir": "a", "disk_space": 1, "prefix_cache_dir": "b"}, "leave disk_dir out"),
        ({"prefix_cache_dir": "a", "enable_prefix_caching": False}, "nothing would be read"),
        (
            {"kv_cache_memory_bytes": 1 << 30, "gpu_memory_utilization": 0.5},
            "both size the KV pool",
        ),
    ],
)
def test_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        config(**options)


@pytest.mark.parametrize(
    "options",
    [
        {"trust_remote_code": True},
        {"kv_cache_dtype": "fp8"},
        {"deterministic": True, "device": "cuda", "attention_backend": "reference"},
    ],
)
def test_what_is_not_built_is_refused_with_a_way_out(options: dict[str, Any]) -> None:
    name = next(iter(options))
    with pytest.raises(InvalidRequestError, match=f"{name}=.* is not in this version; .{{10,}}"):
        config(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"swap_space": 4}, "swap_space=4.* on a CPU: KV is in host memory already"),
        ({"swap_space": 0}, "no host tier"),
        ({"gpu_memory_utilization": 0.5}, r"gpu_memory_utilization=0\.5 on a CPU"),
        ({"enforce_eager": True}, "enforce_eager=True on a CPU"),
        ({"attention_backend": "triton"}, "needs a CUDA device"),
    ],
)
def test_options_of_a_gpu_are_refused_on_a_cpu(
    options: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(InvalidRequestError, match=message):
        config(device="cpu", **options)
    with pytest.raises(InvalidRequestError, match=message):
        config(**options).check_device("cpu")


def test_a_model_object_with_memory_of_its_own_has_a_host_tier() -> None:
    model = ModelObject()
    model.has_device_memory = True  # type: ignore[attr-defined]
    assert config(model=model, swap_space=1).resolve_device() == "cpu"


def test_a_model_object_runs_on_the_cpu() -> None:
    assert config(model=ModelObject()).resolve_device() == "cpu"
    with pytest.raises(InvalidRequestError, match="model object runs on the CPU"):
        config(model=ModelObject(), device="cuda").resolve_device()


def test_device_auto_is_the_gpu_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert config().resolve_device() == "cpu"
    with pytest.raises(InvalidRequestError, match='device="cuda".*sees 0 CUDA devices'):
        config(device="cuda").resolve_device()

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert config().resolve_device() == "cuda:0"
    assert config(device="cuda").resolve_device() == "cuda:0"
    assert config(device="cuda:1").resolve_device() == "cuda:1"
    assert config(device="cpu").resolve_device() == "cpu"
    with pytest.raises(InvalidRequestError, match='device="cuda:2".*sees 2'):
        config(device="cuda:2").resolve_device()


def test_the_cpu_kernels_are_refused_on_a_gpu() -> None:
    with pytest.raises(InvalidRequestError, match='attention_backend="cpu" on device "cuda"'):
        config(device="cuda", attention_backend="cpu")


@pytest.mark.parametrize(
    ("given", "name"), [("half", "float16"), ("float", "float32"), ("auto", "auto")]
)
def test_dtype_aliases(given: str, name: str) -> None:
    assert config(dtype=given).dtype == name


def test_a_torch_dtype_becomes_its_name() -> None:
    import torch

    assert config(dtype=torch.bfloat16).dtype == "bfloat16"
    with pytest.raises(InvalidRequestError, match="dtype='int64'"):
        config(dtype=torch.int64)


def test_numbers_are_normalised_and_the_config_is_frozen() -> None:
    made = config(gpu_memory_utilization=1, seed=np.int64(7))
    assert type(made.gpu_memory_utilization) is float
    assert type(made.seed) is int
    with pytest.raises(AttributeError):
        made.seed = 3  # type: ignore[misc]


def test_a_long_value_does_not_flood_the_message() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        config(tokenizer=[1] * 10_000)
    assert len(str(caught.value)) < 250


def test_quantization_is_int8_or_refused_with_what_there_is() -> None:
    assert EngineConfig(model="m", quantization="int8").quantization == "int8"
    with pytest.raises(InvalidRequestError, match='must be one of "int8"'):
        EngineConfig(model="m", quantization="awq")
