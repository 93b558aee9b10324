"""A server in this process, and the openai package as its client: stream, tools, a schema."""

from __future__ import annotations

import threading

import openai
import pydantic

from cotrt import LLM
from cotrt.server.options import ServerOptions
from cotrt.server.serving import Server

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


class Country(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    capital: str = pydantic.Field(max_length=20)
    millions: int = pydantic.Field(le=999)


def talk(api: openai.OpenAI) -> None:
    asked = {"model": "smollm2-135m", "temperature": 0, "max_tokens": 100}
    question = [{"role": "user", "content": "Name the capital of France."}]
    for event in api.chat.completions.create(**asked, messages=question, stream=True):
        print(event.choices[0].delta.content or "", end="", flush=True)
    print()
    parsed = api.chat.completions.parse(**asked, messages=question, response_format=Country)
    print(parsed.choices[0].message.parsed)
    called = api.chat.completions.create(
        **asked, messages=question, tools=[WEATHER], tool_choice="required"
    )
    print(called.choices[0].message.tool_calls[0].function)
    print(f"cached: {called.usage.prompt_tokens_details.cached_tokens} of the prompt's tokens")


up = threading.Event()
with LLM("smollm2-135m") as llm:
    server = Server(llm, ServerOptions(port=0, api_keys=("sk-mine",)), lambda port: up.set())
    # From a shell: cotrt serve smollm2-135m
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    up.wait()
    with openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="sk-mine") as api:
        talk(api)
    server.should_exit = True
    thread.join()
