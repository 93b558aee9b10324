"""From what a user typed to a model that runs: config, weights, tokenizer, EOS and defaults."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from ..errors import InvalidRequestError, ModelLoadError
from ..options.sampling import SamplingParams, first_problem
from . import hub
from .config import ModelConfig, read_json
from .progress import ProgressBar
from .starter import starter_folder
from .starter_template import TEMPLATE
from .tokenizer import Tokenizer, read_chat_template

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from ..kernels.dispatch import Backend
    from .decoder import Decoder
    from .gguf import GgufSource
    from .native_decoder import NativeDecoder
    from .weights import SafetensorsSource, WeightSource

logger = logging.getLogger("cotrt")

DTYPES = ("auto", "float32", "bfloat16", "float16")
_DEFAULTS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
)


@dataclass(frozen=True)
class LoadedModel:
    """A model and what belongs to it.

    Attributes:
        model: runs steps.
        tokenizer: None where the model has none.
        eos_token_ids: every id that ends a generation: generation_config.json, config.json and
            the tokenizer together.
        generation_defaults: sampling values of generation_config.json, those present only.
        name: what the user called it.
        fingerprint: equal for models that compute the same KV.
        folder: where its files lie.
    """

    model: Decoder | NativeDecoder
    tokenizer: Tokenizer | None
    eos_token_ids: frozenset[int]
    generation_defaults: dict[str, Any]
    name: str
    fingerprint: str
    folder: Path = field(default_factory=Path)


def load(
    model: str | os.PathLike[str],
    *,
    tokenizer: Any = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    chat_template: str | None = None,
    dtype: str = "auto",
    quantization: str | None = None,
    device: str = "cpu",
    attention_backend: str = "auto",
    block_size: int = 16,
    max_model_len: int | None = None,
    deterministic: bool = False,
    generation_config: str = "auto",
    progress: bool | None = None,
) -> LoadedModel:
    """Load a model.

    Args:
        model: a folder, a .gguf file, a hub id, or ``"smollm2-135m"``.
        tokenizer: a folder, hub id or object in place of the model's own.
        revision: of a hub id.
        trust_remote_code: must be False: code of a model never runs.
        chat_template: jinja source, or the path of a file, in place of the model's own.
        dtype: of weights and KV; "auto": the checkpoint's.
        quantization: None, or "int8" where the native CPU kernels serve.
        device: "cpu", "cuda" or "cuda:N".
        attention_backend: see ``kernels.dispatch.choose``.
        block_size: tokens a KV block.
        max_model_len: the longest sequence; None: the model's own.
        deterministic: logits do not depend on the batch.
        generation_config: "auto"; "vllm" takes no sampling defaults from the model.
        progress: show bars on stderr; None: if it is a terminal.

    Raises:
        ModelLoadError: the model is missing, broken, gated or not supported.
        InvalidRequestError: an argument that is not allowed.
    """
    if trust_remote_code:
        raise InvalidRequestError(
            "trust_remote_code=True is not in this version: code of a model never runs. Leave it "
            "out; the supported families need none."
        )
    if quantization not in (None, "int8"):
        raise InvalidRequestError(
            f"quantization={quantization!r} is not in this version; None or 'int8' (on a CPU)."
        )
    if dtype not in DTYPES:
        raise InvalidRequestError(f"dtype {dtype!r} is unknown; one of {', '.join(DTYPES)}.")
    template = None if chat_template is None else read_chat_template(chat_template)
    found = hub.find(model, revision=revision, progress=progress)

    from ..kernels import dispatch
    from .conditions import conditions
    from .readable_weights import ReadableWeights
    from .weights import check_tensors, fingerprint

    generation = read_json(found.folder / "generation_config.json") if not found.gguf else {}
    defaults = {} if generation_config == "vllm" else _generation_defaults(generation)
    _check_defaults(defaults, found.folder)
    config, stored = _open(found)
    try:
        source = ReadableWeights(stored, config, found.name)
        check_tensors(source, config, found.name)
        length = _max_model_len(config, max_model_len, found.name)
        kind = _dtype(dtype, config, source)
        opened = _tokenizer(tokenizer, found, template, progress)
        mark = fingerprint(stored, config)
        backend = dispatch.choose(device, kind, config.head_dim, block_size, attention_backend)
        title = f"loading {Path(found.name).name}"
        with ProgressBar(title, config.num_layers, "layer", progress) as bar:
            built = _build(
                config,
                source,
                kind,
                device,
                backend,
                attention_backend,
                quantization,
                length,
                block_size,
                deterministic,
                bar.update,
            )
    finally:
        stored.close()
    # What KV is computed with besides the checkpoint itself.
    built.fingerprint = f"{mark}-{built.kv_shape.dtype}-{quantization or 'none'}"
    # Only where bits are promised: else a record that one computed is as good for another.
    if deterministic:
        built.computed_under = conditions(built.backend_name, device, block_size)
    return LoadedModel(
        model=built,
        tokenizer=opened,
        eos_token_ids=_eos_token_ids(generation, config, opened),
        generation_defaults=defaults,
        name=found.name,
        fingerprint=mark,
        folder=found.folder,
    )


def _open(found: hub.Found) -> tuple[ModelConfig, SafetensorsSource | GgufSource]:
    if found.gguf is not None:
        from .gguf import GgufSource

        source = GgufSource(found.gguf)
        return ModelConfig.from_dict(source.config(), found.name), source
    from .weights import open_weights

    return ModelConfig.from_folder(found.folder), open_weights(found.folder)


def _build(
    config: ModelConfig,
    source: WeightSource,
    dtype: torch.dtype,
    device: str,
    backend: Backend,
    requested: str,
    quantization: str | None,
    max_model_len: int,
    block_size: int,
    deterministic: bool,
    progress: Callable[[int], None],
) -> Decoder | NativeDecoder:
    """The decoder for a backend: on a CPU the whole stack natively, where it can serve."""
    from ..kernels import dispatch

    reason = f"they run as {backend.name} ({backend.why})"
    if backend.name == "cpu":
        from .native_decoder import NativeDecoder, refusal

        refused = refusal(config)
        if refused is None:
            logger.info("kernels: cpu, one native call a step (%s)", backend.why)
            return NativeDecoder(
                config,
                source,
                dtype=dtype,
                quantization=quantization,
                max_model_len=max_model_len,
                deterministic=deterministic,
                progress=progress,
            )
        reason = refused
    if quantization is not None:
        raise InvalidRequestError(
            f"quantization={quantization!r} needs the native CPU kernels, and {reason}."
        )
    if backend.name == "cpu":
        if requested == "cpu":
            raise InvalidRequestError(
                f"attention_backend='cpu' cannot serve this model: {reason}; use 'auto'."
            )
        # A stack that the native code cannot run as one goes layer by layer in plain torch.
        backend = dispatch.choose("cpu", dtype, config.head_dim, 16, "reference")
    logger.info("kernels: %s (%s)", backend.name, reason)
    from .decoder import Decoder, DecoderWeights

    weights = DecoderWeights.from_source(source, config, dtype, device, progress)
    if deterministic:
        from .deterministic import deterministic_backend

        backend = deterministic_backend(backend, config, weights, block_size)
    return Decoder(config, weights, backend, max_model_len=max_model_len, in_chunks=deterministic)


def _max_model_len(config: ModelConfig, asked: int | None, name: str) -> int:
    own, reason = config.max_model_len, config.max_model_len_reason
    if asked is None:
        if reason is not None:
            logger.info("%s: max_model_len is %d: %s.", name, own, reason)
        return own
    if isinstance(asked, bool) or not isinstance(asked, int) or asked < 1:
        raise InvalidRequestError(f"max_model_len must be a positive integer, got {asked!r}.")
    if asked > own:
        if reason is not None:
            raise InvalidRequestError(
                f"max_model_len={asked} is more than {own}, the most that {name} can be served "
                f"with: {reason}."
            )
        logger.warning(
            "%s: max_model_len=%d is more than the %d tokens that its config.json is meant for; "
            "results beyond them may be poor.",
            name,
            asked,
            own,
        )
    return asked


def _dtype(asked: str, config: ModelConfig, source: WeightSource) -> torch.dtype:
    import torch

    name = asked
    if asked == "auto":
        name = config.dtype or ""
        if name not in DTYPES:
            name = source.kind("model.norm.weight")
    if name not in DTYPES:
        raise ModelLoadError(
            f"the checkpoint's dtype {name!r} is not supported; give dtype='float32' or 'bfloat16'."
        )
    kind: torch.dtype = getattr(torch, name)
    return kind


def _tokenizer(
    given: Any, found: hub.Found, template: str | None, progress: bool | None
) -> Tokenizer | None:
    if given is None:
        if found.gguf is not None:
            from .gguf import open_tokenizer

            return Tokenizer.from_object(open_tokenizer(found.gguf), chat_template=template)
        if template is None and found.folder == starter_folder():
            template = TEMPLATE
        return Tokenizer.from_folder(found.folder, chat_template=template)
    if not isinstance(given, (str, os.PathLike)):
        return Tokenizer.from_object(given, chat_template=template)
    folder = hub.find(given, progress=progress, weights=False).folder
    opened = Tokenizer.from_folder(folder, chat_template=template)
    if opened is None:
        raise ModelLoadError(
            f"tokenizer {os.fspath(given)!r}: {folder} has no tokenizer files; give a folder or "
            "hub id that has a tokenizer.json."
        )
    return opened


def _eos_token_ids(
    generation: dict[str, Any], config: ModelConfig, tokenizer: Tokenizer | None
) -> frozenset[int]:
    ids: set[int] = set()
    for value in (generation.get("eos_token_id"), config.raw.get("eos_token_id")):
        ids.update(
            i
            for i in (value if isinstance(value, list) else [value])
            if isinstance(i, int) and not isinstance(i, bool)
        )
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        ids.add(tokenizer.eos_token_id)
    return frozenset(i for i in ids if 0 <= i < config.vocab_size)


def _generation_defaults(generation: dict[str, Any]) -> dict[str, Any]:
    """Sampling values that are set; ``do_sample: false`` means greedy whatever else it says."""
    defaults = {k: generation[k] for k in _DEFAULTS if generation.get(k) is not None}
    if generation.get("do_sample") is False:
        defaults["temperature"] = 0.0
    return defaults


def _check_defaults(defaults: dict[str, Any], folder: Path) -> None:
    """Refuse a default that no request could have, before weights are read."""
    try:
        SamplingParams(**defaults)
    except ValidationError as error:
        where, text = first_problem(error)
        raise ModelLoadError(
            f"{folder / 'generation_config.json'}: {where.partition('.')[0]}: {text}; correct it "
            'there, or take no defaults from the model: generation_config="vllm"'
        ) from error
