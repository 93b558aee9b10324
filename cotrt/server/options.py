"""Options of the server itself; those of the engine are `LLM`'s."""

from __future__ import annotations

from dataclasses import dataclass

from cotrt.errors import InvalidRequestError


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Where to listen, who may call, and how much one request may ask for.

    Attributes:
        host, port: where to listen; port 0 takes a free one.
        api_keys: keys of which a request must carry one; none leaves the server open.
        served_model_names: names that requests may use, the first of which replies carry.
        max_queue: outputs that may wait beyond those that run; more get a 429.
        max_body_bytes: length of a request's body.
        max_prompts: prompts of one completions request.
        max_outputs: prompts times n of one request.
        max_logit_bias: entries of one logit_bias.
        max_text_chars: characters of one schema, regex, grammar or choice.
        body_timeout_s: seconds in which a request's body must have come.
        write_timeout_s: seconds for which a client may leave a stream unread.
        shutdown_timeout_s: seconds that running requests have to end after SIGTERM.
        tool_call_parser: "auto" (by the chat template), "hermes", "llama3_json" or "none".
        reasoning_parser: "think" splits <think> off as reasoning_content, "none" leaves it.
        max_branches, max_branches_per_key: branches that live over HTTP.
        default_ttl_s, max_ttl_s: lease of a branch.
        allowed_origins: origins that browsers may call from; none turns CORS off.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    served_model_names: tuple[str, ...] = ()
    max_queue: int = 1024
    max_body_bytes: int = 8 << 20
    max_prompts: int = 256
    max_outputs: int = 1024
    max_logit_bias: int = 1024
    max_text_chars: int = 1 << 16
    body_timeout_s: float = 60.0
    write_timeout_s: float = 60.0
    shutdown_timeout_s: float = 30.0
    tool_call_parser: str = "auto"
    reasoning_parser: str = "think"
    max_branches: int = 4096
    max_branches_per_key: int = 1024
    default_ttl_s: float = 600.0
    max_ttl_s: float = 86400.0
    allowed_origins: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for key in self.api_keys:
            if not key or not key.isascii() or not key.isprintable() or " " in key:
                raise InvalidRequestError(
                    "an API key must be printable ASCII without spaces, and not empty"
                )
        parsers = ("auto", "hermes", "llama3_json", "none")
        if self.tool_call_parser not in parsers:
            raise InvalidRequestError(
                f"tool_call_parser={self.tool_call_parser!r}: must be one of {', '.join(parsers)}"
            )
        if self.reasoning_parser not in ("think", "none"):
            raise InvalidRequestError(
                f"reasoning_parser={self.reasoning_parser!r}: must be think or none"
            )
        for name in ("max_queue", "max_branches", "max_branches_per_key", "shutdown_timeout_s"):
            if getattr(self, name) < 0:
                raise InvalidRequestError(f"{name}={getattr(self, name)}: must be 0 or more")
        for name in ("max_body_bytes", "max_prompts", "max_outputs", "default_ttl_s", "max_ttl_s"):
            if getattr(self, name) <= 0:
                raise InvalidRequestError(f"{name}={getattr(self, name)}: must be above 0")
