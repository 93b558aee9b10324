"""The real `openai` package against the server: sync, async, streams, tools, errors."""

from __future__ import annotations

import json
from collections.abc import Iterator

import openai
import pytest
from isolation import shared_fixture
from server_rig import Rig, letters, replying, running, scripted

HELLO = [{"role": "user", "content": "Hello"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CALL = (
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome", "n": [1, "}"]}}\n'
    "</tool_call>"
)


def client(rig: Rig, **options: object) -> openai.OpenAI:
    return openai.OpenAI(
        base_url=f"{rig.url}/v1", api_key=rig.key or "none", max_retries=0, **options
    )


@shared_fixture()
def rig() -> Iterator[Rig]:
    with running(scripted(letters), served_model_names=("letters",)) as made:
        yield made


@shared_fixture()
def hermes() -> Iterator[Rig]:
    text = f"<think>\nweather?\n</think>\n\nI look it up. {CALL}\n{CALL}"
    with running(scripted(replying(text))) as made:
        yield made


def test_models_are_listed_and_found(rig: Rig) -> None:
    api = client(rig)
    assert [model.id for model in api.models.list()] == ["letters"]
    assert api.models.retrieve("letters").id == "letters"
    with pytest.raises(openai.NotFoundError) as caught:
        api.chat.completions.create(model="gpt-9", messages=HELLO)
    assert caught.value.code == "model_not_found"


def test_completion_equals_the_engine_and_its_own_stream(rig: Rig) -> None:
    api = client(rig)
    asked = {"model": "letters", "prompt": ["ab", "cd"], "n": 2, "seed": 7, "max_tokens": 9}
    whole = api.completions.create(**asked)
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    texts = ["", "", "", ""]
    usage = None
    for event in api.completions.create(
        **asked, stream=True, stream_options={"include_usage": True}
    ):
        usage = event.usage or usage
        for choice in event.choices:
            texts[choice.index] += choice.text
    assert texts == [choice.text for choice in whole.choices]
    assert usage is not None and usage.completion_tokens == 36 and usage.prompt_tokens == 4
    assert whole.usage.completion_tokens == 36
    from cotrt import SamplingParams

    direct = rig.llm.generate(["ab", "cd"], SamplingParams(n=2, seed=7, max_tokens=9))
    assert texts == [output.text for request in direct for output in request.outputs]


def test_chat_has_role_first_one_finish_a_choice_and_usage_last(rig: Rig) -> None:
    events = list(
        client(rig).chat.completions.create(
            model="letters",
            messages=HELLO,
            n=3,
            max_completion_tokens=6,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert events[-1].choices == [] and events[-1].usage.completion_tokens == 18
    assert all(event.usage is None for event in events[:-1])
    for index in range(3):
        mine = [e.choices[0] for e in events[:-1] if e.choices[0].index == index]
        assert mine[0].delta.role == "assistant"
        assert all(choice.delta.role is None for choice in mine[1:])
        assert [choice.finish_reason for choice in mine[:-1]] == [None] * (len(mine) - 1)
        assert mine[-1].finish_reason == "length"
        assert len("".join(choice.delta.content or "" for choice in mine)) == 6


def test_cached_tokens_are_reported(rig: Rig) -> None:
    api = client(rig)
    long = [{"role": "user", "content": "x" * 200}]
    for _ in range(2):
        reply = api.chat.completions.create(model="letters", messages=long, max_tokens=1)
    details = reply.usage.prompt_tokens_details
    assert reply.usage.prompt_tokens >= 200 and details.cached_tokens >= 192


@pytest.mark.parametrize("stream", [False, True])
def test_tool_calls_reasoning_and_content_are_told_apart(hermes: Rig, stream: bool) -> None:
    api = client(hermes)
    asked = {"model": hermes.service.names[0], "messages": HELLO, "tools": [WEATHER]}
    if stream:
        with api.chat.completions.stream(**asked) as events:
            for _ in events:
                pass
            choice = events.get_final_completion().choices[0]
    else:
        choice = api.chat.completions.create(**asked).choices[0]
    message = choice.message
    assert choice.finish_reason == "tool_calls"
    assert message.reasoning_content == "weather?"
    assert message.content == "I look it up."
    assert [call.function.name for call in message.tool_calls] == ["get_weather"] * 2
    assert json.loads(message.tool_calls[1].function.arguments) == {"city": "Rome", "n": [1, "}"]}
    assert len({call.id for call in message.tool_calls}) == 2


def test_a_streamed_call_comes_in_parts_and_ends_with_tool_calls(hermes: Rig) -> None:
    events = client(hermes).chat.completions.create(
        model=hermes.service.names[0],
        messages=HELLO,
        tools=[WEATHER],
        parallel_tool_calls=False,
        stream=True,
    )
    choices = [event.choices[0] for event in events]
    parts = [c.delta.tool_calls[0] for c in choices if c.delta.tool_calls]
    assert parts[0].id and parts[0].function.name == "get_weather"
    assert all(part.id is None and part.index == 0 for part in parts[1:])
    assert len(parts) > 3
    assert json.loads("".join(p.function.arguments for p in parts))["city"] == "Rome"
    assert choices[-1].finish_reason == "tool_calls"


def test_without_tools_a_call_is_text(hermes: Rig) -> None:
    for options in ({}, {"tools": [WEATHER], "tool_choice": "none"}):
        reply = client(hermes).chat.completions.create(
            model=hermes.service.names[0], messages=HELLO, **options
        )
        assert CALL in reply.choices[0].message.content
        assert reply.choices[0].finish_reason == "stop"


def test_a_tools_result_goes_back_through_the_template(hermes: Rig) -> None:
    api, name = client(hermes), hermes.service.names[0]
    first = api.chat.completions.create(model=name, messages=HELLO, tools=[WEATHER])
    message = first.choices[0].message
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": "sunny"} for call in message.tool_calls
    ]
    second = api.chat.completions.create(
        model=name, messages=[*HELLO, message, *results], tools=[WEATHER], max_tokens=3
    )
    assert second.usage.prompt_tokens > first.usage.prompt_tokens


def test_llama_calls_are_found_and_other_json_stays_text() -> None:
    text = (
        '{"name": "get_weather", "parameters": {"city": "Oslo"}}; '
        '{"name": "get_weather", "parameters": {}}'
    )
    with running(scripted(replying(text)), tool_call_parser="llama3_json") as rig:
        reply = client(rig).chat.completions.create(
            model=rig.service.names[0], messages=HELLO, tools=[WEATHER]
        )
        calls = reply.choices[0].message.tool_calls
        assert [call.function.arguments for call in calls] == ['{"city": "Oslo"}', "{}"]
    with running(
        scripted(replying('{"name": "Bob", "age": 3}')), tool_call_parser="llama3_json"
    ) as rig:
        reply = client(rig).chat.completions.create(
            model=rig.service.names[0], messages=HELLO, tools=[WEATHER]
        )
        assert reply.choices[0].message.content == '{"name": "Bob", "age": 3}'
        assert reply.choices[0].message.tool_calls is None


@pytest.mark.anyio
async def test_async_client_streams_many_at_once(rig: Rig) -> None:
    import anyio

    texts: dict[int, str] = {}
    async with openai.AsyncOpenAI(base_url=f"{rig.url}/v1", api_key="none") as api:

        async def one(index: int) -> None:
            events = await api.chat.completions.create(
                model="letters",
                messages=[{"role": "user", "content": f"{index}"}],
                stream=True,
                max_tokens=20,
                seed=index,
            )
            texts[index] = "".join([e.choices[0].delta.content or "" async for e in events])

        async with anyio.create_task_group() as group:
            for index in range(24):
                group.start_soon(one, index)
        for index in (0, 23):
            alone = await api.chat.completions.create(
                model="letters",
                messages=[{"role": "user", "content": f"{index}"}],
                max_tokens=20,
                seed=index,
            )
            assert alone.choices[0].message.content == texts[index]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def test_errors_are_of_the_clients_own_kinds(rig: Rig) -> None:
    api = client(rig)
    with pytest.raises(openai.BadRequestError) as caught:
        api.completions.create(model="letters", prompt="x" * 70000)
    assert caught.value.code == "context_length_exceeded"
    assert "65536" in str(caught.value)
    with pytest.raises(openai.BadRequestError) as caught:
        api.chat.completions.create(model="letters", messages=HELLO, temperature=101)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as caught:
        api.chat.completions.create(model="letters", messages=HELLO, extra_body={"foo": 1})
    assert caught.value.param == "foo"


def test_continue_final_message_goes_on_inside_it(rig: Rig) -> None:
    reply = client(rig).chat.completions.create(
        model="letters",
        messages=[*HELLO, {"role": "assistant", "content": "I sa"}],
        extra_body={"continue_final_message": True, "return_token_ids": True},
        max_tokens=4,
    )
    prompt = "".join(map(chr, reply.prompt_token_ids))
    assert prompt.endswith("<assistant>I sa")
    assert "".join(map(chr, reply.choices[0].token_ids)) == reply.choices[0].message.content


def test_thinking_that_the_prompt_has_opened_is_reasoning() -> None:
    llm = scripted(
        replying("hm, so\n</think>\n\nYes", "<think>"),
        chat_template="{% for m in messages %}{{ m.content }}{% endfor %}<think>\n",
    )
    with running(llm) as rig:
        for stream in (False, True):
            reply = client(rig).chat.completions.create(
                model=rig.service.names[0], messages=HELLO, stream=stream
            )
            if stream:
                deltas = [event.choices[0].delta for event in reply]
                thought = "".join(getattr(d, "reasoning_content", None) or "" for d in deltas)
                content = "".join(d.content or "" for d in deltas)
            else:
                thought = reply.choices[0].message.reasoning_content
                content = reply.choices[0].message.content
            assert (thought, content) == ("hm, so", "Yes")
