"""What the branch routes are sent."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from cotrt.options.sampling import MAX_LOGPROBS, MAX_NUM_TOKENS
from cotrt.server.chat_request import Message, Tool
from cotrt.server.completions import Ids
from cotrt.server.sampling_fields import NumTokens, RequestModel, Text, TokenId
from cotrt.server.service import Service
from cotrt.server.structured import GuidedFields

Ttl = Annotated[float, Field(gt=0, le=1e9)]
Continuation = str | list[TokenId]


class LeaseFields(RequestModel):
    """``ttl``: seconds that the branch lives on after its last use."""

    ttl: Ttl | None = None


class CreateRequest(LeaseFields):
    """A root: of text, of token ids, or of messages. Nothing is an empty root."""

    model: str | None = None
    prompt: str | list[TokenId] | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    tools: list[Tool] | None = None


class ForkRequest(LeaseFields):
    """``n`` children at absolute length ``at``, by default at the end."""

    n: Annotated[int, Field(ge=1, le=1024)] = 1
    at: NumTokens | None = None


class ExtendRequest(LeaseFields):
    """Text that follows the branch's own, or token ids."""

    text: str | None = None
    token_ids: list[TokenId] | None = None
    special: bool = True


class GenerateRequest(GuidedFields):
    """How to sample; no ``max_tokens`` is no limit."""

    ttl: Ttl | None = None
    n: Annotated[int, Field(ge=1, le=1)] = 1
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    stream: bool = False

    def fields(self, service: Service) -> dict[str, Any]:
        """Fields for `SamplingParams`."""
        fields = self.overrides(service.options)
        fields.update(max_tokens=self.max_tokens, logprobs=self.logprobs, n=1)
        fields["structured_outputs"] = self.grammar(service.options.max_text_chars)
        return fields


class ScoreRequest(LeaseFields):
    """One continuation, or a list of them, after ``given``."""

    continuations: Text | Ids | Annotated[list[Text | Ids], Field(min_length=1, max_length=1024)]
    given: Continuation = ""


class ChooseRequest(LeaseFields):
    """Options of which the best is appended after ``given``."""

    options: Annotated[list[Text | Ids], Field(min_length=1, max_length=1024)]
    given: Continuation = ""
    normalize: Literal["mean", "sum"] = "mean"


class TruncateRequest(LeaseFields):
    """Back to an absolute length."""

    length: Annotated[int, Field(ge=0, le=MAX_NUM_TOKENS)]
    same_draws: bool = False


class KeepRequest(LeaseFields):
    """``seconds``: for so long its KV is evicted last, and the branch lives on at least so long."""

    seconds: Annotated[float, Field(ge=0, le=1e9)] | None = None
