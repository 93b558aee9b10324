"""A server over a model without weights, in this process, for the fuzz and the soak."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from cotrt import LLM
from cotrt.server.options import ServerOptions
from cotrt.server.serving import Server
from cotrt.testing import ScriptedModel

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def by_path(ids: Sequence[int]) -> Mapping[int, float]:
    """The next letter by every token before: one text a prompt, whatever else runs."""
    return {97 + hash(tuple(ids)) % 26: 1.0}


def anything(ids: Sequence[int]) -> Mapping[int, float]:
    """Every token, so that no mask leaves a request without one."""
    return {i: 1.0 + (len(ids) * 31 + i) % 7 for i in range(300)}


@contextlib.contextmanager
def serving(
    next_probs: Callable[[Sequence[int]], Mapping[int, float]],
    *,
    options: Mapping[str, Any] = {},
    **engine: Any,
) -> Iterator[Server]:
    """A server on a free port of 127.0.0.1."""
    model = ScriptedModel(
        next_probs, vocab_size=300, eos_token_id=0, max_model_len=engine.pop("model_len", 4096)
    )
    engine = {"kv_cache_memory_bytes": 1 << 18, "chat_template": TEMPLATE, **engine}
    up = threading.Event()
    with LLM(model, **engine) as llm:
        server = Server(llm, ServerOptions(port=0, **options), lambda _: up.set())
        thread = threading.Thread(target=server.run)
        thread.start()
        try:
            if not up.wait(30):
                raise RuntimeError("the server did not start")
            yield server
        finally:
            server.should_exit = True
            thread.join()
