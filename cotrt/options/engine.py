"""Options of ``LLM(...)``: checked strictly, against each other and against the device."""

from __future__ import annotations

import math
import numbers
import os
import re
from dataclasses import dataclass, field
from typing import Any

from cotrt.errors import InvalidRequestError

_DTYPES = {
    "auto": "auto",
    "float32": "float32",
    "float": "float32",
    "bfloat16": "bfloat16",
    "float16": "float16",
    "half": "float16",
}
_DEFAULT_GPU_MEMORY_UTILIZATION = 0.9


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Every option of ``LLM(...)``; making one checks all that can be checked without a device.

    Numbers are normalised (``gpu_memory_utilization=1`` becomes ``1.0``), dtype names lose their
    aliases, and a ``torch.dtype`` becomes its name.

    Attributes:
        model: hub id, local folder, .gguf file, "smollm2-135m", or an object with a model's
            methods such as ``cotrt.testing.ScriptedModel``.
        tokenizer: folder or hub id, or an object with ``encode`` and ``decode``; the model's own
            when None.
        revision: branch, tag or commit of a hub model.
        trust_remote_code: False; code that comes with a model never runs in this version.
        chat_template: Jinja text, or a file that holds it, in place of the tokenizer's own.
        generation_config: "auto" takes sampling defaults from the model's
            ``generation_config.json``; "vllm" takes none.
        dtype: "auto" (the checkpoint's), "float32", "bfloat16" or "float16".
        quantization: None, or "int8" for weights in 8 bits, one scale an output channel,
            quantised at load (CPU only).
        device: "auto", "cpu", "cuda" or "cuda:N".
        num_threads: CPU threads of the engine; chosen from the usable cores when None.
        seed: where the draws of unseeded branches start, -2**63 to 2**64 - 1.
        max_model_len: tokens a sequence may have; the model's, lowered to the pool, when None.
        block_size: tokens a KV block, a power of two from 8 to 256.
        kv_cache_dtype: "auto", the model's dtype; no other value is in this version.
        gpu_memory_utilization: share of a GPU's memory for weights and pool, in (0, 1].
        kv_cache_memory_bytes: size of the KV pool; chosen when None.
        swap_space: GiB of host memory for KV that leaves a GPU; 4, or a fifth of what is free
            where that is less, when None. There is none on a CPU.
        disk_space: GiB of disk for KV that leaves memory; 0 for none. Beside `prefix_cache_dir`
            its bound, 4 where 0.
        disk_dir: folder of that disk space, in which a private one is made and removed; the
            system's temporary folder when None.
        prefix_cache_dir: folder of a prefix cache that outlives the process; prompts can be read
            off it, so it should be as private as they are.
        max_num_seqs: sequences that run at once.
        max_num_batched_tokens: tokens that one step computes at most.
        enable_prefix_caching: whether a new prompt is matched against KV computed before.
        attention_backend: "auto", "reference", "cpu" or "triton".
        deterministic: True: logits of equal tokens are equal to the bit, whatever else runs; on
            a GPU with the Triton kernels.
        enforce_eager: True never captures CUDA graphs.
        logprobs_mode: "raw" (before penalties, masks and temperature) or "processed".
        saved_key: signs saved branches, and says whose KV is shared with other prompts: at least 16
            bytes, or a file that holds them; the key of this installation, in ``$COTRT_HOME``,
            when None.

    Raises:
        InvalidRequestError: an option of the wrong type or out of its range, two that exclude
            each other, or one that is not in this version.
    """

    model: Any
    tokenizer: Any = None
    revision: str | None = None
    trust_remote_code: bool = False
    chat_template: str | None = None
    generation_config: str = "auto"
    dtype: str = "auto"
    quantization: str | None = None
    device: str = "auto"
    num_threads: int | None = None
    seed: int = 0
    max_model_len: int | None = None
    block_size: int = 16
    kv_cache_dtype: str = "auto"
    gpu_memory_utilization: float = _DEFAULT_GPU_MEMORY_UTILIZATION
    kv_cache_memory_bytes: int | None = None
    swap_space: float | None = None
    disk_space: float = 0.0
    disk_dir: str | os.PathLike[str] | None = None
    prefix_cache_dir: str | os.PathLike[str] | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    enable_prefix_caching: bool = True
    attention_backend: str = "auto"
    deterministic: bool = False
    enforce_eager: bool = False
    logprobs_mode: str = "raw"
    saved_key: bytes | str | os.PathLike[str] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        self._check_model()
        for name in (
            "trust_remote_code",
            "enable_prefix_caching",
            "deterministic",
            "enforce_eager",
        ):
            if not isinstance(getattr(self, name), bool):
                raise InvalidRequestError(f"{name}={getattr(self, name)!r}: must be True or False")
        self._check_names()
        self._check_numbers()
        self._check_not_built()
        self._check_together()

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _check_model(self) -> None:
        model, tokenizer = self.model, self.tokenizer
        if isinstance(model, (str, os.PathLike)):
            if not os.fspath(model):
                raise InvalidRequestError("model='': name a hub id, a folder or a .gguf file")
        elif not callable(getattr(model, "run", None)) or isinstance(model, type):
            raise InvalidRequestError(
                f"model={_short(model)}: must be a hub id, a folder, a .gguf file or a model "
                "object such as cotrt.testing.ScriptedModel"
            )
        if isinstance(tokenizer, (str, os.PathLike)):
            if not os.fspath(tokenizer):
                raise InvalidRequestError("tokenizer='': leave it out to use the model's own")
        elif tokenizer is not None and not (
            callable(getattr(tokenizer, "encode", None))
            and callable(getattr(tokenizer, "decode", None))
        ):
            raise InvalidRequestError(
                f"tokenizer={_short(tokenizer)}: must be a folder, a hub id, or an object with "
                "encode and decode"
            )
        for name in ("revision", "chat_template"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value):
                raise InvalidRequestError(
                    f"{name}={_short(value)}: must be a string that is not empty, or None"
                )

    def _check_names(self) -> None:
        dtype = self.dtype
        if type(dtype).__module__ == "torch":
            dtype = str(dtype).removeprefix("torch.")
        if not isinstance(dtype, str) or dtype not in _DTYPES:
            raise InvalidRequestError(f"dtype={dtype!r}: must be one of {_names(_DTYPES)}")
        self._set("dtype", _DTYPES[dtype])
        if not isinstance(self.device, str) or not re.fullmatch(
            r"auto|cpu|cuda(:\d{1,3})?", self.device
        ):
            raise InvalidRequestError(
                f'device={self.device!r}: must be "auto", "cpu", "cuda" or "cuda:N"; other '
                "devices are not in this version"
            )
        self._check_choice("attention_backend", ("auto", "reference", "cpu", "triton"))
        self._check_choice("logprobs_mode", ("raw", "processed"))
        if self.quantization is not None:
            self._check_choice(
                "quantization", ("int8",), "; other kinds are not in this version; leave it out"
            )
        self._check_choice(
            "generation_config",
            ("auto", "vllm"),
            '; a folder of its own is not in this version: give SamplingParams instead, or "vllm" '
            "to take nothing from the model",
        )

    def _check_choice(self, name: str, allowed: tuple[str, ...], hint: str = "") -> None:
        value = getattr(self, name)
        if not isinstance(value, str) or value not in allowed:
            raise InvalidRequestError(
                f"{name}={_short(value)}: must be one of {_names(allowed)}{hint}"
            )

    def _check_numbers(self) -> None:
        self._check_int("seed", -(2**63), 2**64 - 1)
        self._check_int("block_size", 8, 256)
        if self.block_size & (self.block_size - 1):
            raise InvalidRequestError(
                f"block_size={self.block_size}: must be a power of two, 8 to 256; 16 suits most"
            )
        self._check_int("max_num_seqs", 1, 1 << 20)
        self._check_int("max_num_batched_tokens", 1, 1 << 24)
        self._check_int("num_threads", 1, 4096, optional=True)
        self._check_int("max_model_len", 1, 2**31 - 1, optional=True)
        self._check_int("kv_cache_memory_bytes", 1, 1 << 60, optional=True)
        self._check_float("gpu_memory_utilization", 1.0)
        if not self.gpu_memory_utilization:
            raise InvalidRequestError("gpu_memory_utilization=0: must be above 0 and at most 1")
        self._check_float("swap_space", 1 << 20, optional=True)
        self._check_float("disk_space", 1 << 20)

    def _check_int(self, name: str, low: int, high: int, *, optional: bool = False) -> None:
        value = getattr(self, name)
        if optional and value is None:
            return
        kind = "an int or None" if optional else "an int"
        is_int = isinstance(value, numbers.Integral) and not isinstance(value, bool)
        if not is_int:
            raise InvalidRequestError(f"{name}={_short(value)}: must be {kind}, {low} to {high}")
        if not low <= value <= high:
            raise InvalidRequestError(f"{name}={value}: must be {low} to {high}")
        self._set(name, int(value))

    def _check_float(self, name: str, high: float, *, optional: bool = False) -> None:
        value = getattr(self, name)
        if optional and value is None:
            return
        kind = "a number or None" if optional else "a number"
        is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
        if not is_number:
            raise InvalidRequestError(f"{name}={_short(value)}: must be {kind}, 0 to {high}")
        if not (math.isfinite(value) and 0 <= value <= high):
            raise InvalidRequestError(f"{name}={value}: must be 0 to {high}")
        self._set(name, float(value))

    def _check_not_built(self) -> None:
        """Refuse what the contract names and this version cannot do; what is built leaves here."""
        for name, wanted, instead in (
            ("trust_remote_code", False, "leave it False, and use a model that needs no code"),
            ("kv_cache_dtype", "auto", 'use "auto": KV in the dtype of the model'),
        ):
            value = getattr(self, name)
            if value != wanted:
                raise InvalidRequestError(
                    f"{name}={_short(value)} is not in this version; {instead}"
                )

    def _check_folders(self) -> None:
        for name in ("disk_dir", "prefix_cache_dir"):
            value = getattr(self, name)
            if value is None:
                continue
            path = os.fspath(value) if isinstance(value, (str, os.PathLike)) else ""
            if not path or "\0" in os.fsdecode(path):
                raise InvalidRequestError(
                    f"{name}={_short(value)}: must be a folder's path or None"
                )
        if self.disk_dir is not None and self.prefix_cache_dir is not None:
            raise InvalidRequestError(
                f"disk_dir={_short(self.disk_dir)} and prefix_cache_dir="
                f"{_short(self.prefix_cache_dir)}: KV that leaves memory goes to one folder; the "
                "prefix cache takes all of it, so leave disk_dir out"
            )
        if self.disk_dir is not None and not self.disk_space:
            raise InvalidRequestError(
                f"disk_dir={_short(self.disk_dir)} with disk_space=0: say how many GiB it may take"
            )
        if self.prefix_cache_dir is not None and not self.enable_prefix_caching:
            raise InvalidRequestError(
                f"prefix_cache_dir={_short(self.prefix_cache_dir)} with enable_prefix_caching="
                "False: nothing would be read from it; leave one of them out"
            )

    def _check_saved_key(self) -> None:
        key = self.saved_key
        if key is None or (isinstance(key, bytes) and len(key) >= 16):
            return
        if isinstance(key, bytes):
            raise InvalidRequestError(
                f"saved_key has {len(key)} bytes: must have at least 16; secrets.token_bytes(32) "
                "makes one"
            )
        path = os.fspath(key) if isinstance(key, (str, os.PathLike)) else ""
        if not path or "\0" in os.fsdecode(path):
            raise InvalidRequestError(
                f"saved_key: must be bytes, a file's path or None, not {type(key).__name__}"
            )

    def _check_together(self) -> None:
        self._check_folders()
        self._check_saved_key()
        if (
            self.kv_cache_memory_bytes is not None
            and self.gpu_memory_utilization != _DEFAULT_GPU_MEMORY_UTILIZATION
        ):
            raise InvalidRequestError(
                f"kv_cache_memory_bytes={self.kv_cache_memory_bytes} and "
                f"gpu_memory_utilization={self.gpu_memory_utilization} both size the KV pool; "
                "give one of them"
            )
        if self.device == "cpu":
            self.check_device("cpu")
        if self.device.startswith("cuda"):
            self.check_device("cuda")

    def resolve_device(self) -> str:
        """The device to run on, ``"cpu"`` or ``"cuda:N"``; checks the options that hang on it.

        A model object (``ScriptedModel``) runs on the CPU.

        Raises:
            InvalidRequestError: a CUDA device that is not there, or an option that does not fit
                the device.
        """
        device = self.device
        if not isinstance(self.model, (str, os.PathLike)):
            if device.startswith("cuda"):
                raise InvalidRequestError(
                    f'device="{device}": a model object runs on the CPU; leave device out'
                )
            device = "cpu"
        if device != "cpu":
            import torch

            count = torch.cuda.device_count() if torch.cuda.is_available() else 0
            index = int(device.partition(":")[2] or 0)
            if device == "auto":
                device = "cuda:0" if count else "cpu"
            elif index >= count:
                raise InvalidRequestError(
                    f'device="{device}": torch {torch.__version__} sees {count} CUDA devices; use '
                    '"cpu", or install a CUDA build of torch and look at CUDA_VISIBLE_DEVICES'
                )
            else:
                device = f"cuda:{index}"
        self.check_device(device)
        return device

    def check_device(self, device: str) -> None:
        """Check the options that hang on the device.

        Args:
            device: ``"cpu"``, or a name that begins with ``"cuda"``.

        Raises:
            InvalidRequestError: an option that means nothing, or is not built, on that device.
        """
        if device != "cpu":
            if self.attention_backend == "cpu":
                raise InvalidRequestError(
                    f'attention_backend="cpu" on device "{device}": use "auto" or "triton"'
                )
            if self.deterministic and self.attention_backend == "reference":
                raise InvalidRequestError(
                    f'deterministic=True with attention_backend="reference" on device "{device}" '
                    'is not in this version; use "auto" or "triton": products of plain torch '
                    "depend on the batch there"
                )
            return
        if self.swap_space is not None and not getattr(self.model, "has_device_memory", False):
            raise InvalidRequestError(
                f"swap_space={self.swap_space} on a CPU: KV is in host memory already, so there "
                "is no host tier; leave it out and size the pool with kv_cache_memory_bytes"
            )
        if self.gpu_memory_utilization != _DEFAULT_GPU_MEMORY_UTILIZATION:
            raise InvalidRequestError(
                f"gpu_memory_utilization={self.gpu_memory_utilization} on a CPU: it sizes the pool "
                "of a GPU; leave it out and use kv_cache_memory_bytes"
            )
        if self.enforce_eager:
            raise InvalidRequestError(
                "enforce_eager=True on a CPU: it turns off CUDA graphs, and there are none; leave "
                "it out"
            )
        if self.attention_backend == "triton" and os.environ.get("TRITON_INTERPRET") != "1":
            raise InvalidRequestError(
                'attention_backend="triton" on a CPU: it needs a CUDA device; use "auto"'
            )


def _names(allowed: Any) -> str:
    return ", ".join(f'"{name}"' for name in allowed)


def _short(value: Any) -> str:
    """A value as it stands in a message: its repr, cut so that an object cannot flood the line."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
