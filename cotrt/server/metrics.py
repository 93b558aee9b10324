"""What `/metrics` tells, in prometheus' text form.

Names are vLLM's where the meaning is the same; the tree's own begin with ``cotrt:``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from cotrt.engine.state import GenerationState
    from cotrt.program.llm import LLM

_FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.5, 5, 10, 30, 60)
_NEXT_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5)
_REQUEST = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640)

_COUNTERS = {
    "preemptions": ("vllm:num_preemptions", "Sequences whose KV was taken away while they ran."),
    "prompt_tokens_computed": ("cotrt:prompt_tokens_computed", "Given tokens computed."),
    "prompt_tokens_reused": ("cotrt:prompt_tokens_reused", "Given tokens whose KV was there."),
    "recomputed_tokens": ("cotrt:recomputed_tokens", "Tokens computed again."),
    "forks": ("cotrt:forks", "Branches forked."),
    "copies_on_write": ("cotrt:copies_on_write", "KV blocks copied at a first write."),
    "prunes": ("cotrt:prunes", "Branches pruned."),
    "evicted_blocks": ("cotrt:evicted_blocks", "Cached KV blocks evicted."),
    "stored_blocks": ("cotrt:stored_blocks", "KV blocks moved to host memory or disk."),
    "loaded_blocks": ("cotrt:loaded_blocks", "KV blocks loaded in place of computing."),
    "loaded_tokens": ("cotrt:loaded_tokens", "Tokens whose KV was loaded."),
    "failed_loads": ("cotrt:failed_loads", "KV records that could not be read."),
    "steps": ("cotrt:steps", "Steps of the engine."),
    "generated_tokens": ("vllm:generation_tokens", "Tokens sampled."),
}


class ServerMetrics:
    """Histograms of requests, and the engine's own numbers at the moment of asking."""

    def __init__(self, llm: LLM, model_name: str) -> None:
        self._registry = CollectorRegistry()
        labels = ("model_name",)

        def histogram(name: str, text: str, buckets: Iterable[float]) -> Histogram:
            made = Histogram(name, text, labels, registry=self._registry, buckets=tuple(buckets))
            return made.labels(model_name)

        self._first = histogram(
            "vllm:time_to_first_token_seconds", "From arrival to the first token.", _FIRST_TOKEN
        )
        self._next = histogram(
            "vllm:inter_token_latency_seconds",
            "Between tokens of an output, by its mean, counted once an output.",
            _NEXT_TOKEN,
        )
        self._whole = histogram(
            "vllm:e2e_request_latency_seconds", "From arrival to the end.", _REQUEST
        )
        self._ended = Counter(
            "vllm:request_success",
            "Outputs that ended, by finish_reason.",
            ("model_name", "finished_reason"),
            registry=self._registry,
        )
        self._prompt_tokens = Counter(
            "vllm:prompt_tokens", "Prompt tokens of requests.", labels, registry=self._registry
        ).labels(model_name)
        self._name = model_name
        self._registry.register(_EngineCollector(llm, model_name))

    def observe(self, states: Iterable[GenerationState]) -> None:
        """Count outputs that have ended."""
        for state in states:
            if not state.finished:
                continue
            self._ended.labels(self._name, state.finish_reason or "abort").inc()
            self._prompt_tokens.inc(state.start)
            self._whole.observe(state.finished - state.created)
            if state.first_token:
                self._first.observe(state.first_token - state.created)
                if len(state.tokens) > 1:
                    seconds = state.finished - state.first_token
                    self._next.observe(seconds / (len(state.tokens) - 1))

    def text(self) -> bytes:
        """The page. It waits for a step to end: not for the event loop."""
        return generate_latest(self._registry)


class _EngineCollector(Collector):
    def __init__(self, llm: LLM, model_name: str) -> None:
        self._llm = llm
        self._model_name = model_name

    def collect(self) -> Iterator[Metric]:
        metrics, memory = self._llm.metrics, self._llm.memory()
        for name, (label, text) in _COUNTERS.items():
            yield self._counter(label, text, metrics[name])
        yield self._gauge("vllm:num_requests_running", "Sequences that run.", metrics["running"])
        yield self._gauge("vllm:num_requests_waiting", "Sequences that wait.", metrics["waiting"])
        yield self._gauge(
            "vllm:kv_cache_usage_perc", "Share of KV blocks in use.", memory.in_use / memory.total
        )
        reused = metrics["prompt_tokens_reused"]
        queried = reused + metrics["prompt_tokens_computed"]
        yield self._counter("vllm:prefix_cache_queries", "Given tokens looked up.", queried)
        yield self._counter("vllm:prefix_cache_hits", "Of those, tokens found.", reused)
        blocks = GaugeMetricFamily(
            "cotrt:kv_blocks", "KV blocks by state.", labels=("model_name", "state")
        )
        for state in ("free", "in_use", "cached", "host", "disk"):
            blocks.add_metric((self._model_name, state), getattr(memory, state))
        yield blocks
        yield self._gauge(
            "cotrt:kv_tokens_stored", "Filled KV slots, each block once.", memory.tokens_stored
        )
        yield self._gauge(
            "cotrt:kv_tokens_held", "Computed tokens as branches see them.", memory.tokens_held
        )

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(name, text, labels=("model_name",))
        family.add_metric((self._model_name,), value)
        return family

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, text, labels=("model_name",))
        family.add_metric((self._model_name,), value)
        return family
