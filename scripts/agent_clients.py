"""Agents' own clients against the server, over a scripted model that answers right.

    python scripts/agent_clients.py FOLDER

makes a virtual environment in FOLDER, installs smolagents, langchain-openai, llm and instructor
there, starts a server for each template (one that opens a thought, one that does not), lets every
client do its work, and prints a table. The exit code is 1 where one did not get its answer.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import venv
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PACKAGES = ("smolagents[openai]", "langchain-openai", "llm", "instructor")
TURNS = (
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c | tojson }}{% endfor %}|{% endfor %}"
)
TEMPLATES = {
    "plain": TURNS + "{% if add_generation_prompt %}<assistant>{% endif %}",
    "thinking": TURNS + "{% if add_generation_prompt %}<assistant>\n<think>\n{% endif %}",
    "no place for tools": "{% for m in messages %}<{{ m.role }}>{{ m.content }}|{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}",
}
THOUGHT = "They want {an answer}: <tool_call>? Observation: I know it.\n</think>\n\n"


# ---- the clients, which run in the other environment ------------------------------------------


def call(name: str, /, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def asking(question: str, *replies: str) -> str:
    """A question that tells the scripted model what to reply, turn by turn."""
    return question + "".join(f"[[{reply}]]" for reply in replies)


def smolagents_tool_calling(url: str) -> Any:
    from smolagents import OpenAIServerModel, ToolCallingAgent, tool

    @tool
    def add(a: int, b: int) -> int:
        """Add.

        Args:
            a: one number.
            b: another.
        """
        return a + b

    model = OpenAIServerModel("scripted", api_base=f"{url}/v1", api_key="none")
    agent = ToolCallingAgent(tools=[add], model=model, verbosity_level=0, max_steps=3)
    replies = (call("add", a=2, b=3), call("final_answer", answer="five"))
    return agent.run(asking("2 and 3?", *replies)) == "five"


def smolagents_code(url: str) -> Any:
    from smolagents import CodeAgent, OpenAIServerModel

    model = OpenAIServerModel("scripted", api_base=f"{url}/v1", api_key="none")
    agent = CodeAgent(
        tools=[],
        model=model,
        use_structured_outputs_internally=True,
        verbosity_level=0,
        max_steps=2,
    )
    reply = json.dumps({"thought": "Observation: I add.", "code": "final_answer(2 + 3)"})
    return agent.run(asking("2 and 3?", reply)) == 5


def _person() -> Any:
    import pydantic

    class Person(pydantic.BaseModel):
        name: str
        age: int

    return Person


ANN = {"name": "Ann", "age": 30}


def langchain_function_calling(url: str) -> Any:
    from langchain_openai import ChatOpenAI

    chat = ChatOpenAI(model="scripted", base_url=f"{url}/v1", api_key="none")
    found = chat.with_structured_output(_person(), method="function_calling")
    return found.invoke(asking("Who?", call("Person", **ANN))).age == 30


def langchain_json_schema(url: str) -> Any:
    from langchain_openai import ChatOpenAI

    chat = ChatOpenAI(model="scripted", base_url=f"{url}/v1", api_key="none")
    found = chat.with_structured_output(_person(), method="json_schema")
    return found.invoke(asking("Who?", json.dumps(ANN))).name == "Ann"


def langchain_tools_streamed(url: str) -> Any:
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_openai import ChatOpenAI

    def now() -> str:
        """The time."""
        return "12:00"

    chat = ChatOpenAI(model="scripted", base_url=f"{url}/v1", api_key="none").bind_tools([now])
    messages: list[Any] = [HumanMessage(asking("Time?", call("now"), "It is noon."))]
    reply = None
    for chunk in chat.stream(messages):
        reply = chunk if reply is None else reply + chunk
    (made,) = reply.tool_calls
    messages += [reply, ToolMessage(now(), tool_call_id=made["id"])]
    return made["args"] == {} and chat.invoke(messages).content == "It is noon."


def _llm_model(url: str) -> Any:
    from llm.default_plugins.openai_models import Chat

    return Chat(
        "scripted",
        model_name="scripted",
        api_base=f"{url}/v1",
        key="none",
        supports_schema=True,
        supports_tools=True,
    )


def llm_schema(url: str) -> Any:
    model = _llm_model(url)
    reply = model.prompt(asking("Who?", json.dumps(ANN)), schema=_person(), stream=False)
    return json.loads(reply.text()) == ANN


def llm_tools(url: str) -> Any:
    def add(a: int, b: int) -> int:
        """Add."""
        return a + b

    chain = _llm_model(url).chain(
        asking("2 and 3?", call("add", a=2, b=3), "It is 5."), tools=[add], stream=False
    )
    return chain.text().endswith("It is 5.")


def instructor_in(mode: str) -> Callable[[str], Any]:
    def ask(url: str) -> Any:
        import instructor
        import openai

        client = instructor.from_openai(
            openai.OpenAI(base_url=f"{url}/v1", api_key="none"), mode=instructor.Mode[mode]
        )
        reply = call("Person", **ANN) if "TOOLS" in mode else json.dumps(ANN)
        found = client.chat.completions.create(
            model="scripted",
            response_model=_person(),
            max_retries=0,
            messages=[{"role": "user", "content": asking("Who?", reply)}],
        )
        return found.age == 30

    return ask


CLIENTS: dict[str, Callable[[str], Any]] = {
    "smolagents ToolCallingAgent": smolagents_tool_calling,
    "smolagents CodeAgent, structured": smolagents_code,
    "langchain function calling": langchain_function_calling,
    "langchain json_schema": langchain_json_schema,
    "langchain tools, streamed": langchain_tools_streamed,
    "llm schema": llm_schema,
    "llm tools": llm_tools,
    "instructor TOOLS": instructor_in("TOOLS"),
    "instructor TOOLS_STRICT": instructor_in("TOOLS_STRICT"),
    "instructor JSON": instructor_in("JSON"),
    "instructor JSON_SCHEMA": instructor_in("JSON_SCHEMA"),
}


def run_clients(url: str) -> None:
    for name, client in CLIENTS.items():
        try:
            problem = "" if client(url) else "another answer"
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"[:400]
        print(json.dumps([name, problem]), flush=True)


# ---- the server -------------------------------------------------------------------------------


def byte_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={each: i for i, each in enumerate(letters)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<eos>"])
    made.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def scripted(folder: Path, thinks: bool) -> Any:
    """A model that replies what the question's brackets say, one a turn, then ends."""
    from tokenizers import Tokenizer

    from cotrt.testing import ScriptedModel

    made = Tokenizer.from_file(str(folder / "tokenizer.json"))
    end = made.token_to_id("<eos>")

    def next_probs(path: Sequence[int]) -> Mapping[int, float]:
        text = made.decode(list(path))
        prompt, _, said = text.rpartition("<assistant>")
        question = prompt[prompt.rindex("<user>", 0, prompt.index("[[")) :]
        replies = [part.partition("]]")[0] for part in question.split("[[")[1:]]
        turn = question.count("<assistant>")
        reply = THOUGHT * thinks + replies[min(turn, len(replies) - 1)]
        said = said.removeprefix("\n<think>\n") if thinks else said
        left = reply[len(said) :] if reply.startswith(said) else ""
        return {(made.encode(left).ids or [end])[0]: 1.0}

    return ScriptedModel(
        next_probs,
        vocab_size=made.get_vocab_size(with_added_tokens=True),
        eos_token_id=end,
        tokenizer=str(folder),
        max_model_len=1 << 16,
    )


@contextmanager
def served(template: str) -> Iterator[str]:
    from cotrt import LLM
    from cotrt.server.options import ServerOptions
    from cotrt.server.serving import Server

    ready = threading.Event()
    with tempfile.TemporaryDirectory() as name:
        byte_tokenizer(Path(name))
        model = scripted(Path(name), thinks="think>" in template)
        with LLM(model, kv_cache_memory_bytes=1 << 22, chat_template=template) as llm:
            options = ServerOptions(port=0, shutdown_timeout_s=1, served_model_names=("scripted",))
            server = Server(llm, options, lambda _: ready.set())
            thread = threading.Thread(target=server.run, daemon=True)
            thread.start()
            assert ready.wait(30), "the server did not start"
            try:
                yield f"http://127.0.0.1:{server.port}"
            finally:
                server.should_exit = True
                thread.join(30)


def main() -> int:
    folder = Path(sys.argv[1]).absolute()
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *PACKAGES], check=True)
    failed = 0
    for label, template in TEMPLATES.items():
        with served(template) as url:
            made = subprocess.run(
                [python, __file__, "--client", url],
                capture_output=True,
                text=True,
                check=False,
                env={**os.environ, "OPENAI_API_KEY": "none", "LLM_USER_PATH": str(folder)},
            )
        lines = [line for line in made.stdout.splitlines() if line.startswith('["')]
        failed += len(CLIENTS) - len(lines)
        for line in lines:
            name, problem = json.loads(line)
            failed += bool(problem)
            print(f"{label:20} {name:34} {problem or 'right'}")
        if len(lines) < len(CLIENTS):
            print(made.stderr[-2000:])
    return int(failed > 0)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--client"]:
        run_clients(sys.argv[2])
    else:
        sys.exit(main())
