"""The fields of a request that say how to sample, shared by completions, chats and branches."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from cotrt.options.sampling import MAX_NUM_TOKENS
from cotrt.server.errors import ApiError
from cotrt.server.options import ServerOptions

Text = Annotated[str, Field(min_length=1)]
Stop = Text | Annotated[list[Text], Field(max_length=64)]
TokenId = Annotated[int, Field(ge=0, le=MAX_NUM_TOKENS)]
NumTokens = Annotated[int, Field(ge=0, le=MAX_NUM_TOKENS)]
Bias = Annotated[float, Field(ge=-100, le=100)]
BiasKey = Annotated[str, Field(pattern=r"^\d{1,10}$")]

# Names of SamplingParams that a request may set under the same name.
_SAME = (
    *("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty"),
    *("repetition_penalty", "seed", "min_tokens", "stop", "stop_token_ids", "ignore_eos"),
    *("include_stop_str_in_output", "allowed_token_ids", "bad_words", "skip_special_tokens"),
    "priority",
)


class RequestModel(BaseModel):
    """A request's body: strict types, an unknown field is an error, null says nothing."""

    model_config = ConfigDict(extra="forbid", strict=True, populate_by_name=True)

    @model_validator(mode="before")
    @classmethod
    def _leave_out_nulls(cls, data: Any) -> Any:
        # Clients write out fields that nobody has set.
        if not isinstance(data, dict):
            return data
        return {name: value for name, value in data.items() if value is not None}


class SamplingFields(RequestModel):
    """How to sample. What is left out comes from the model's generation_config.json."""

    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=MAX_NUM_TOKENS)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**64 - 1)] | None = None
    max_tokens: NumTokens | None = None
    min_tokens: NumTokens | None = None
    stop: Stop | None = None
    stop_token_ids: list[TokenId] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    logit_bias: dict[BiasKey, Bias] | None = None
    allowed_token_ids: Annotated[list[TokenId], Field(min_length=1)] | None = None
    bad_words: list[Text] | None = None
    skip_special_tokens: bool | None = None
    priority: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None

    def overrides(self, options: ServerOptions) -> dict[str, Any]:
        """Fields for `SamplingParams`.

        Raises:
            ApiError: more entries than the server takes.
        """
        given = {name: getattr(self, name) for name in _SAME}
        fields = {name: value for name, value in given.items() if value is not None}
        if self.logit_bias:
            if len(self.logit_bias) > options.max_logit_bias:
                raise ApiError(
                    400,
                    f"logit_bias has {len(self.logit_bias)} entries, the limit is "
                    f"{options.max_logit_bias}",
                    param="logit_bias",
                )
            fields["logit_bias"] = {int(key): bias for key, bias in self.logit_bias.items()}
        for name in ("bad_words", "allowed_token_ids", "stop_token_ids"):
            limit = 64 if name == "bad_words" else 1 << 20
            if len(fields.get(name, ())) > limit:
                raise ApiError(400, f"{name} may have at most {limit} entries", param=name)
        return fields
