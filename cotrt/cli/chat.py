"""`cotrt chat`: talk to a model in the terminal, and fork the conversation."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from cotrt.cli.engine_flags import add_engine_flags, add_model_argument, engine_options, model_of
from cotrt.cli.sampling_flags import add_sampling_flags, check_sampling, sampling_params

if TYPE_CHECKING:
    from cotrt import LLM, Chat, SamplingParams

HELP = "talk to a model; /fork a conversation and go on in both"
EXAMPLE = "cotrt chat smollm2-135m --system 'Be brief.'"

_COMMANDS = """\
/fork [N]      N more conversations that go on from here (1)
/branches      list them
/switch N      go on in conversation N
/tree          draw how they grew
/undo          take back the last message and its reply
/save FILE     save this conversation with its KV; to FILE.json: its messages alone
/load FILE     go on with one that was saved
/quit          end (so does Ctrl-D; Ctrl-C stops a reply)"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_argument(parser)
    parser.add_argument("--system", help="system message")
    add_sampling_flags(parser)
    add_engine_flags(parser)


def run(options: argparse.Namespace) -> int:
    """Talk until the end of the input."""
    from cotrt import LLM

    model = model_of(options)
    check_sampling(options)
    with LLM(model, **engine_options(options)) as llm:
        params = sampling_params(options, llm)
        _Talk(llm, params, options.system).run()
    return 0


@dataclass(slots=True)
class _Conversation:
    chat: Chat
    parent: int | None = None
    first: int = 0  # messages that it shares with its parent
    children: list[int] = field(default_factory=list)


class _Talk:
    """The conversations, and the one that is talked in."""

    def __init__(self, llm: LLM, params: SamplingParams, system: str | None) -> None:
        self._llm = llm
        self._params = params
        self._all = [_Conversation(llm.start_chat(system=system))]
        self._now = 0
        self._is_terminal = sys.stdin.isatty()

    def run(self) -> None:
        if self._is_terminal:
            print("/help lists the commands")
        while True:
            try:
                line = input(f"[{self._now}] > " if self._is_terminal else "").strip()
            except EOFError:
                return
            except KeyboardInterrupt:
                print()
                continue
            if line in ("/quit", "/exit"):
                return
            if line:
                self._take(line)

    def _take(self, line: str) -> None:
        from cotrt.errors import CotrtError

        try:
            if line.startswith("/"):
                self._command(*line[1:].split(None, 1))
            else:
                self._say(line)
        except (CotrtError, OSError, ValueError) as error:
            print(f"! {error}")

    def _say(self, text: str) -> None:
        with self._chat.send(text, self._params) as reply:
            try:
                for chunk in reply:
                    print(chunk.text, end="", flush=True)
            except KeyboardInterrupt:
                reply.cancel()
                print(" [stopped]", end="")
        print()

    @property
    def _chat(self) -> Chat:
        return self._all[self._now].chat

    def _command(self, name: str = "", argument: str = "") -> None:
        if name == "fork":
            self._fork(_number(argument or "1"))
        elif name == "branches":
            for index in range(len(self._all)):
                print(self._line(index))
        elif name == "switch":
            index = _number(argument)
            if not 0 <= index < len(self._all):
                raise ValueError(f"/switch {index}: there are 0 to {len(self._all) - 1}")
            self._now = index
        elif name == "tree":
            for index, each in enumerate(self._all):
                if each.parent is None:
                    self._draw(index, "")
        elif name == "undo":
            self._chat.undo()
            print(self._line(self._now))
        elif name == "save":
            self._save(argument)
        elif name == "load":
            self._load(argument)
        elif name in ("help", "?", ""):
            print(_COMMANDS)
        else:
            print(f"! /{name}: there is no such command\n{_COMMANDS}")

    def _fork(self, n: int) -> None:
        parent = self._all[self._now]
        for chat in self._chat.fork(n):
            parent.children.append(len(self._all))
            self._all.append(_Conversation(chat, self._now, len(chat.messages)))
        print(f"{n} more; /switch {len(self._all) - n} goes to the first of them")

    def _line(self, index: int) -> str:
        messages = self._all[index].chat.messages
        last = messages[-1]["content"] if messages else ""
        text = " ".join(str(last).split())
        text = text if len(text) <= 60 else text[:57] + "..."
        mark = "*" if index == self._now else " "
        return f"{mark} {index}  {len(messages)} messages  {text}"

    def _draw(self, index: int, indent: str) -> None:
        print(indent + self._line(index))
        for child in self._all[index].children:
            self._draw(child, indent + "   ")

    def _save(self, path: str) -> None:
        if not path:
            raise ValueError("/save FILE: name a file")
        if path.endswith(".json"):
            from cotrt.saved.new_file import NewFile

            text = json.dumps({"messages": self._chat.messages}, ensure_ascii=False, indent=1)
            with NewFile(path) as file:
                file.write(text.encode("utf-8"))
                file.commit()
        else:
            branch = self._chat.branch
            branch.metadata["messages"] = self._chat.messages
            branch.save(path)
        print(f"saved {path}")

    def _load(self, path: str) -> None:
        if not path:
            raise ValueError("/load FILE: name a file")
        chat = self._llm.start_chat()
        if path.endswith(".json"):
            with open(path, "rb") as file:
                text = file.read()
            try:
                found = json.loads(text)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"/load {path}: it is no JSON: {error}") from error
            chat._messages = _messages_of(found, path)
        else:
            self._load_branch(chat, path)
        self._all.append(_Conversation(chat))
        self._now = len(self._all) - 1
        print(self._line(self._now))

    def _load_branch(self, chat: Chat, path: str) -> None:
        """A conversation with its KV, or its messages where they are of another model."""
        from cotrt.errors import SavedBranchError
        from cotrt.saved.reader import SavedFile

        file = SavedFile(path)
        file.close()
        chat._messages = _messages_of(file.branches[0].metadata, path)
        try:
            branch = self._llm.load_branch(path)
        except SavedBranchError as error:
            print(f"! {error}\n! its messages are computed again")
            return  # the next turn renders them
        chat.branch.prune()
        chat._branch = branch


def _messages_of(found: Any, path: str) -> list[dict[str, Any]]:
    from cotrt.errors import InvalidRequestError
    from cotrt.models.chat_template import normalise_messages

    try:
        messages = found["messages"]
        return normalise_messages(messages) if messages else []
    except (KeyError, TypeError, InvalidRequestError) as error:
        raise ValueError(f"/load {path}: it holds no conversation that /save wrote") from error


def _number(text: str) -> int:
    if not text.isdecimal():
        raise ValueError(f"{text!r} is not a number")
    return int(text)
