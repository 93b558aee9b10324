"""`cotrt run`: one prompt, or a file of prompts."""

from __future__ import annotations

import argparse
import codecs
import contextlib
import json
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TextIO

from cotrt.cli.checks import check_can_write
from cotrt.cli.engine_flags import add_engine_flags, add_model_argument, engine_options, model_of
from cotrt.cli.sampling_flags import add_sampling_flags, check_sampling, sampling_params

if TYPE_CHECKING:
    from cotrt import LLM, SamplingParams

HELP = "generate for one prompt, or for a file of prompts (JSON lines in and out)"
EXAMPLE = (
    "cotrt run smollm2-135m --prompt 'The capital of France is' --temperature 0; "
    "cotrt run smollm2-135m --file prompts.jsonl --output replies.jsonl, where each line is a "
    '"prompt", {"prompt": ...} or {"messages": [...]}, with sampling fields beside it'
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_argument(parser)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", help="one prompt; its text streams to stdout")
    source.add_argument("--file", help="JSON lines; - for stdin")
    parser.add_argument("--output", help="where the JSON lines go (default: stdout)")
    parser.add_argument("--chat", action="store_true", help="--prompt is what a user says")
    add_sampling_flags(parser)
    add_engine_flags(parser)


def run(options: argparse.Namespace) -> int:
    """Generate.

    Returns:
        1 where a prompt of a file failed; its line then says how.
    """
    from cotrt import LLM

    model = model_of(options)
    check_sampling(options)
    check_can_write(options.output, "--output")
    lines = _read(options.file) if options.file is not None else None
    with LLM(model, **engine_options(options)) as llm:
        params = sampling_params(options, llm)
        if lines is None:
            return _run_one(llm, options, params)
        with _sink(options.output) as sink:
            return _run_file(llm, lines, params, sink)


def _run_one(llm: LLM, options: argparse.Namespace, params: SamplingParams) -> int:
    prompt: Any = options.prompt
    if options.chat:
        prompt = [{"role": "user", "content": prompt}]
    with llm.branch(prompt) as branch, branch.generate(params) as generation:
        for chunk in generation:
            print(chunk.text, end="", flush=True)
    print()
    return 0


def _read(path: str) -> list[dict[str, Any]]:
    """The file's prompts, all checked before anything runs."""
    from cotrt.errors import InvalidRequestError

    with contextlib.nullcontext(sys.stdin) if path == "-" else open(path, encoding="utf-8") as file:
        texts = [(number, line) for number, line in enumerate(file, 1) if line.strip()]
    lines = []
    for number, text in texts:
        try:
            value = json.loads(text)
        except ValueError as error:
            raise InvalidRequestError(f"{path}:{number}: not JSON: {error}") from None
        if isinstance(value, str):
            value = {"prompt": value}
        if not isinstance(value, dict) or ("prompt" in value) == ("messages" in value):
            raise InvalidRequestError(
                f'{path}:{number}: must be a string, or an object with "prompt" or "messages"'
            )
        lines.append(value)
    return lines


def _run_file(llm: LLM, lines: list[dict[str, Any]], params: SamplingParams, sink: TextIO) -> int:
    from tqdm import tqdm

    from cotrt.errors import CotrtError, InvalidRequestError

    prompts: list[Any] = []
    each = []
    for number, line in enumerate(lines, 1):
        fields = {k: v for k, v in line.items() if k not in ("prompt", "messages", "id")}
        try:
            each.append(params.replace(**fields) if fields else params)
            prompt = line.get("prompt")
            if prompt is None:
                prompt = {"prompt_token_ids": llm._runtime.encode_chat(line["messages"])}
            prompts.append(prompt)
        except (CotrtError, ValueError) as error:
            raise InvalidRequestError(f"line {number}: {error}") from None
    if not prompts:
        return 0
    handles = [llm.submit([prompt], [one]) for prompt, one in zip(prompts, each)]
    failed = 0
    # JSON has a way to write any character; a stand-in would lose it.
    can_show_all = codecs.lookup(sink.encoding or "utf-8").name.startswith("utf")
    try:
        quiet = not sys.stderr.isatty()
        for line, handle in tqdm(list(zip(lines, handles)), unit="prompt", disable=quiet):
            reply: dict[str, Any] = {k: line[k] for k in ("id", "prompt", "messages") if k in line}
            try:
                output = handle.result()[0]
                reply["outputs"] = [
                    {"text": one.text, "finish_reason": one.finish_reason} for one in output.outputs
                ]
                reply["usage"] = {
                    "prompt_tokens": len(output.prompt_token_ids),
                    "completion_tokens": sum(len(one.token_ids) for one in output.outputs),
                    "cached_tokens": output.num_cached_tokens,
                }
            except CotrtError as error:
                failed += 1
                reply["error"] = str(error)
            print(json.dumps(reply, ensure_ascii=not can_show_all), file=sink, flush=True)
    finally:
        for handle in handles:
            handle.cancel()
    return 1 if failed else 0


@contextlib.contextmanager
def _sink(path: str | None) -> Iterator[TextIO]:
    if path is None:
        yield sys.stdout
    else:
        with open(path, "w", encoding="utf-8") as file:
            yield file
