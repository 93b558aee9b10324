"""`LLM`: a model, its engine, and everything that starts from them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from cotrt.engine.engine import Engine
from cotrt.engine.records.record_stores import TierOptions
from cotrt.errors import InvalidRequestError
from cotrt.options.engine import EngineConfig
from cotrt.options.pool_size import disk_tier_bytes, host_tier_bytes, size_pool
from cotrt.options.sampling import BeamSearchParams, SamplingParams
from cotrt.outputs import BeamSearchOutput, MemoryStats, RequestOutput
from cotrt.program.branch import Branch
from cotrt.program.runtime import Runtime
from cotrt.program.saved_key import read_saved_key
from cotrt.program.submission import ChatPrompt, Prompt, Submission, submit

if TYPE_CHECKING:
    from cotrt.engine.model import StepModel
    from cotrt.program.chat import Chat

Message = Mapping[str, Any]


class LLM:
    """A model with its own engine: one thread, one KV pool, one tree of branches.

    A context manager, safe to use from several threads.

    Args:
        model: hub id, local folder of safetensors, .gguf file, "smollm2-135m" (the starter model),
            or an object such as `cotrt.testing.ScriptedModel`.
        tokenizer: folder, hub id, or an object with ``encode`` and ``decode``; default: the
            model's own.
        revision, trust_remote_code, chat_template, generation_config, dtype, quantization, device,
            num_threads, seed, max_model_len, block_size, kv_cache_dtype, gpu_memory_utilization,
            kv_cache_memory_bytes, swap_space, disk_space, disk_dir, prefix_cache_dir,
            max_num_seqs, max_num_batched_tokens, enable_prefix_caching, attention_backend,
            deterministic, enforce_eager, logprobs_mode, saved_key: as
            `cotrt.options.engine.EngineConfig` says of each.

    Raises:
        ModelLoadError: the model is missing, broken, gated or not supported.
        InvalidRequestError: an option that is wrong, or not in this version.
    """

    def __init__(
        self,
        model: Any,
        *,
        tokenizer: Any = None,
        revision: str | None = None,
        trust_remote_code: bool = False,
        chat_template: str | None = None,
        generation_config: str = "auto",
        dtype: Any = "auto",
        quantization: str | None = None,
        device: str = "auto",
        num_threads: int | None = None,
        seed: int = 0,
        max_model_len: int | None = None,
        block_size: int = 16,
        kv_cache_dtype: str = "auto",
        gpu_memory_utilization: float = 0.9,
        kv_cache_memory_bytes: int | None = None,
        swap_space: float | None = None,
        disk_space: float = 0.0,
        disk_dir: str | os.PathLike[str] | None = None,
        prefix_cache_dir: str | os.PathLike[str] | None = None,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int = 2048,
        enable_prefix_caching: bool = True,
        attention_backend: str = "auto",
        deterministic: bool = False,
        enforce_eager: bool = False,
        logprobs_mode: str = "raw",
        saved_key: bytes | str | os.PathLike[str] | None = None,
    ) -> None:
        options = dict(locals())
        del options["self"]
        config = EngineConfig(**options)
        if config.saved_key is not None:
            read_saved_key(config.saved_key)  # a file that is not there is told before all else
        device = config.resolve_device()
        if isinstance(model, (str, os.PathLike)):
            step_model, reader, eos_ids, defaults = _load(config, device)
        else:
            step_model, reader, eos_ids, defaults = _wrap(config)
        pool = size_pool(
            config,
            device=device,
            kv_bytes_per_token=step_model.kv_bytes_per_token,
            model_max_len=step_model.max_model_len,
            step_bytes=_warm_up(step_model, config),
        )
        tiers = _tiers(config, device, step_model)
        try:
            engine = Engine(
                step_model,
                num_blocks=pool.num_blocks,
                block_size=pool.block_size,
                max_num_seqs=pool.max_num_seqs,
                max_num_batched_tokens=config.max_num_batched_tokens,
                seed=config.seed,
                match_prompts=config.enable_prefix_caching,
                processed_logprobs=config.logprobs_mode == "processed",
                deterministic=config.deterministic,
                check_laws=os.environ.get("COTRT_CHECK_LAWS") == "1",
                tiers=tiers,
            )
        except OSError as error:
            folder = "disk_dir" if config.prefix_cache_dir is None else "prefix_cache_dir"
            raise InvalidRequestError(
                f"{folder}: KV cannot be kept there: {error}; name a folder that can be written"
            ) from error
        self._runtime = Runtime(
            engine,
            tokenizer=reader,
            eos_ids=eos_ids,
            defaults=defaults,
            max_model_len=pool.max_model_len,
            saved_key=config.saved_key,
        )
        self.config = config

    # ---- prompts ------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Generate for every prompt and wait.

        Args:
            prompts: a str, a list of token ids, ``{"prompt_token_ids": [...]}`` or a `Branch`
                (continued in place), or a list of those.
            sampling_params: one for all, or one each; default: the model's generation_config.
                ``max_tokens`` unset means 16 here.
            use_tqdm: show a progress bar, where stderr is a terminal.

        Returns:
            One output a prompt, in the order of the prompts.

        Raises:
            InvalidRequestError, PromptTooLongError, KVCacheExhaustedError: the first bad prompt
                or params, named by index; nothing has run then.
            BranchBusyError, BranchPrunedError: a branch among the prompts cannot go on.
            CotrtError: a prompt failed while running; ``.outputs`` has the others' results.
            EngineDeadError: the engine has stopped.
        """
        return self.submit(prompts, sampling_params)._result_with_progress(use_tqdm)

    def submit(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Submission:
        """`generate` without waiting.

        Returns:
            A handle of the list of outputs that is also a sequence of `Generation`, one an
            output, prompt by prompt and by index within a prompt.

        Raises:
            InvalidRequestError, PromptTooLongError, KVCacheExhaustedError, BranchBusyError,
            BranchPrunedError, EngineDeadError: as `generate`, at the call.
        """
        return submit(self._runtime, prompts, sampling_params, default_max_tokens=16)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Reply to a conversation, or to each of several.

        Message contents are encoded with special tokens as plain text.

        Args:
            messages: dicts with "role" and "content", or a list of such lists.
            sampling_params: as in `generate`, but ``max_tokens`` unset means no limit.
            tools: tool definitions for the template.
            chat_template: Jinja text in place of the tokenizer's.
            chat_template_kwargs: more variables for the template.
            add_generation_prompt: end the prompt where the assistant's turn begins.
            continue_final_message: go on with the last message, which must be the assistant's;
                turns the generation prompt off.
            use_tqdm: show a progress bar, where stderr is a terminal.

        Raises:
            InvalidRequestError: no chat template, bad messages, and what `generate` raises.
            PromptTooLongError, KVCacheExhaustedError, CotrtError, EngineDeadError: as `generate`.
        """
        for name, flag in (
            ("add_generation_prompt", add_generation_prompt),
            ("continue_final_message", continue_final_message),
        ):
            if not isinstance(flag, bool):
                raise InvalidRequestError(f"{name}={flag!r:.80}: must be True or False")
        single = isinstance(messages, Mapping) or not messages  # a message alone is refused below
        many = not single and not isinstance(messages[0], Mapping)
        conversations: Any = messages if many else [messages]
        options = {
            "tools": tools,
            "chat_template": chat_template,
            "chat_template_kwargs": chat_template_kwargs,
            "add_generation_prompt": add_generation_prompt and not continue_final_message,
            "continue_final_message": continue_final_message,
        }
        prompts = [
            ChatPrompt(*self._runtime.render_chat(conversation, **options))
            for conversation in conversations
        ]
        return submit(
            self._runtime, prompts, sampling_params, default_max_tokens=None
        )._result_with_progress(use_tqdm)

    def start_chat(
        self,
        system: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
    ) -> Chat:
        """A conversation that keeps its KV from turn to turn.

        Raises:
            InvalidRequestError: the model has no chat template and none is given.
        """
        from cotrt.program.chat import Chat

        return Chat(self._runtime, system=system, tools=tools, chat_template=chat_template)

    def beam_search(
        self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams
    ) -> list[BeamSearchOutput]:
        """Search with beams; beams are forks, so no prompt is computed twice.

        Args:
            prompts: as in `generate`, branches aside.
            params: width, length and the score's length penalty.

        Raises:
            InvalidRequestError, PromptTooLongError, KVCacheExhaustedError: a bad prompt.
            EngineDeadError: the engine has stopped.
        """
        from cotrt.program.beam_search import beam_search

        return beam_search(self._runtime, prompts, params)

    # ---- branches -----------------------------------------------------------------------------

    def branch(self, prompt: str | Sequence[int] | Sequence[Message] = "") -> Branch:
        """A root branch.

        Args:
            prompt: text (encoded with the tokenizer's special tokens), token ids, or chat messages
                (rendered with the chat template and a generation prompt). An empty root holds
                the tokenizer's BOS if it has one; with none it must be extended before it is
                generated from.

        Raises:
            InvalidRequestError: not one of these, or a bad token id.
            PromptTooLongError, KVCacheExhaustedError: it does not fit.
            EngineDeadError: the engine has stopped.
        """
        runtime = self._runtime
        runtime.check()
        if isinstance(prompt, Sequence) and len(prompt) and isinstance(prompt[0], Mapping):
            ids = runtime.encode_chat(prompt)
        else:
            ids = runtime.encode_prompt(prompt)[1]
        with runtime.engine.lock:
            runtime.check_length(len(ids))
            return Branch(runtime, runtime.engine.table.new_root(ids))

    def load_branch(self, path: str | os.PathLike[str], *, kv: str = "auto") -> Branch:
        """Make a branch again from a file that `Branch.save` wrote, and all that was saved with it.

        Tokens, log-probabilities, seeds, numbers of forks and metadata are those that were saved,
        so it goes on as if it had never been away. KV is read from the file when it is needed:
        the file has to stay as it is for so long, or what is missing is computed again. Block
        sizes, devices and kernels may differ from those that saved it; with ``deterministic=True``
        KV of other conditions is computed again, with a warning in the log. It counts as one more
        root.

        Args:
            path: the file. Everything in it is checked first; none of it is code.
            kv: "auto" takes the KV, which must be of this model; "recompute" takes the tokens
                alone, whatever model they come from.

        Returns:
            The branch that was saved, a root now. It holds the handles of what was loaded with
            it, so ``branch.children`` live as long as it does.

        Raises:
            SavedBranchError: the file is missing, damaged, no saved branch or of another model.
            PromptTooLongError, KVCacheExhaustedError: a branch in it does not fit.
            InvalidRequestError: a bad path or `kv`.
            EngineDeadError: the engine has stopped.
        """
        from cotrt.program.branch_files import load

        return load(self._runtime, path, kv)

    # ---- looking inside -----------------------------------------------------------------------

    def memory(self) -> MemoryStats:
        """The KV pool between two steps, after all earlier releases.

        Raises:
            EngineDeadError: the engine has stopped.
        """
        from cotrt.program.stats import memory_stats

        runtime = self._runtime
        runtime.check()
        with runtime.engine.lock:
            promise = runtime.engine.when_between_steps(lambda: memory_stats(runtime.engine))
        promise.wait(lambda: promise.done)
        if promise.error is not None:
            raise promise.error
        stats: MemoryStats = promise.value
        return stats

    @property
    def metrics(self) -> dict[str, int]:
        """Counters since the LLM was made, and gauges.

        ``prompt_tokens_computed`` and ``generated_tokens_computed``: given and sampled tokens whose
        KV was computed for the first time; ``recomputed_tokens``: again, after preemption or
        eviction, or for logits where the KV was there; ``prompt_tokens_reused``: once a request,
        tokens whose KV was there or being computed; ``generated_tokens``: sampled;
        ``preemptions, forks, copies_on_write, prunes, evicted_blocks, running, waiting, steps``.
        Of memory tiers: ``stored_blocks, loaded_blocks, loaded_tokens`` (moved out, moved in),
        ``failed_loads`` (records that could not be read), ``host_blocks, disk_blocks`` (there now).

        Raises:
            EngineDeadError: the process was forked.
        """
        from cotrt.program.stats import metrics

        runtime = self._runtime
        runtime.check_process()
        with runtime.engine.lock:
            return metrics(runtime.engine)

    @property
    def tokenizer(self) -> Any:
        """The tokenizer, or None."""
        return self._runtime.tokenizer

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""
        return self._runtime.vocab_size

    @property
    def kernels(self) -> str:
        """The kernels that the model runs on: "cpu", "reference", "triton" or "scripted"."""
        return self._runtime.engine.model.backend_name

    @property
    def max_model_len(self) -> int:
        """Tokens that a sequence may have."""
        return self._runtime.max_model_len

    def close(self) -> None:
        """Stop: running work ends with `EngineDeadError`. Idempotent."""
        self._runtime.driver.stop()
        if self._runtime.engine.records is not None:
            self._runtime.engine.records.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        model = self.config.model
        named = isinstance(model, (str, os.PathLike))
        name = repr(os.fspath(model)) if named else type(model).__name__
        return f"<LLM {name}: {self.kernels} kernels, max_model_len {self.max_model_len}>"

    def __reduce__(self) -> Any:
        raise TypeError(
            "an LLM cannot be pickled: it owns a thread and the KV pool; make one in each process, "
            "or serve one and send it requests"
        )


def _load(
    config: EngineConfig, device: str
) -> tuple[StepModel, Any, frozenset[int], Mapping[str, Any]]:
    from cotrt import models

    if config.num_threads is not None:
        import torch

        torch.set_num_threads(config.num_threads)
    loaded = models.load(
        config.model,
        tokenizer=config.tokenizer,
        revision=config.revision,
        trust_remote_code=config.trust_remote_code,
        chat_template=config.chat_template,
        dtype=config.dtype,
        quantization=config.quantization,
        device=device,
        attention_backend=config.attention_backend,
        block_size=config.block_size,
        max_model_len=config.max_model_len,
        deterministic=config.deterministic,
        generation_config=config.generation_config,
    )
    if loaded.model.backend_name == "cpu":
        from cotrt.kernels.cpu.native import set_num_threads

        set_num_threads(config.num_threads)
    return loaded.model, loaded.tokenizer, loaded.eos_token_ids, loaded.generation_defaults


def _warm_up(model: StepModel, config: EngineConfig) -> int:
    """Bytes that steps will take of a GPU; a model on the CPU has nothing to warm up."""
    from cotrt.models.decoder import Decoder

    if not isinstance(model, Decoder):
        return 0
    return model.warm_up(
        max_num_seqs=min(config.max_num_seqs, config.max_num_batched_tokens),
        max_num_batched_tokens=config.max_num_batched_tokens,
        block_size=config.block_size,
        capture=not config.enforce_eager,
    )


def _tiers(config: EngineConfig, device: str, model: StepModel) -> TierOptions | None:
    """Where KV goes that leaves the pool; None: nowhere."""
    has_host = device != "cpu" or getattr(model, "has_device_memory", False)
    host = host_tier_bytes(config) if has_host else 0
    disk = disk_tier_bytes(config)
    if not host and not disk:
        return None
    folder = config.prefix_cache_dir
    if folder is None:
        return TierOptions(host_bytes=host, disk_bytes=disk, disk_dir=config.disk_dir)
    if not model.fingerprint:
        raise InvalidRequestError(
            f"prefix_cache_dir={os.fspath(folder)!r}: the model has no fingerprint, so its KV "
            "cannot be told from another's; leave prefix_cache_dir out"
        )
    return TierOptions(host_bytes=host, disk_bytes=disk, disk_dir=folder, keep=True)


def _wrap(config: EngineConfig) -> tuple[StepModel, Any, frozenset[int], Mapping[str, Any]]:
    """A model object: it names its own tokenizer and end-of-sequence ids."""
    from pathlib import Path

    # Before the engine's thread starts: a Ctrl-C while that thread imports torch would be taken
    # for a handled one, and the program would end with 1.
    import torch  # noqa: F401

    from cotrt.models.tokenizer import Tokenizer, read_chat_template

    model = config.model
    template = None if config.chat_template is None else read_chat_template(config.chat_template)
    given = config.tokenizer if config.tokenizer is not None else model.tokenizer
    if isinstance(given, (str, os.PathLike)):
        reader = Tokenizer.from_folder(Path(given), chat_template=template)
        if reader is None:
            raise InvalidRequestError(f"tokenizer={str(given)!r}: there is no tokenizer there")
    else:
        reader = None if given is None else Tokenizer.from_object(given, chat_template=template)
    return model, reader, frozenset(model.eos_token_ids), {}
