"""What completions and chats have in common."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from cotrt.server.errors import ApiError
from cotrt.server.options import ServerOptions
from cotrt.server.sampling_fields import RequestModel
from cotrt.server.structured import GuidedFields


class StreamOptions(RequestModel):
    """What a stream carries besides the text. ``include_obfuscation`` is ignored."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: Any = None


class OpenAIFields(GuidedFields):
    """What completions and chats have in common.

    ``user``, ``metadata``, ``store``, ``service_tier``, ``safety_identifier``,
    ``prompt_cache_key``, ``prompt_cache_retention``, ``prediction`` and ``request_id`` change no
    text and are ignored. Every other field that is not named here is refused.
    """

    model: str | None = None
    n: Annotated[int, Field(ge=1, le=1024)] = 1
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    add_special_tokens: bool = True
    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    prediction: Any = None
    request_id: Any = None

    def check_outputs(self, num_prompts: int, options: ServerOptions) -> int:
        """Outputs of the request.

        Raises:
            ApiError: more than the server takes, or stream options without a stream.
        """
        outputs = self.n * num_prompts
        if outputs > options.max_outputs:
            raise ApiError(
                400,
                f"n={self.n} for {num_prompts} prompts is {outputs} outputs, the limit is "
                f"{options.max_outputs}",
                param="n",
            )
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options needs stream=true", param="stream_options")
        return outputs

    @property
    def wants_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def wants_usage_always(self) -> bool:
        return self.stream_options is not None and self.stream_options.continuous_usage_stats
