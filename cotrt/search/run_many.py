"""A search over many questions, resumable: one line of JSON a question."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import anyio

from cotrt.errors import InvalidRequestError
from cotrt.search.callbacks import check_int
from cotrt.search.result import SearchResult

Key = tuple[str, int]


async def run_many(
    fn: Callable[[Any], Awaitable[SearchResult]],
    questions: Iterable[Any],
    *,
    out: str | os.PathLike[str],
    concurrency: int = 1,
    progress: bool | None = None,
) -> list[SearchResult]:
    """``fn(question)`` for every question; each result is a line of `out` as soon as it is there.

    Questions that `out` holds are not asked again, so that the same call goes on after a crash; a
    last line that was cut off is dropped. A result that was cancelled is not written.

    Args:
        fn: an async function of one question.
        questions: what JSON can hold: texts, dicts. Equal ones are told apart by their order.
        out: the file of JSON lines: ``{"question": ..., "repeat": 0, "result": {...}}``.
        concurrency: questions at once; each draws the same whatever runs beside it where ``fn``
            gives a seed.
        progress: a bar with tokens/s and the share of prompt tokens that were reused; None: where
            stderr is a terminal.

    Returns:
        The results, in the order of the questions.

    Raises:
        InvalidRequestError: a question that JSON cannot hold, or a file with lines of another
            kind.
        Exception: what `fn` raised; what is done stays written.
    """
    check_int("concurrency", concurrency, 1)
    path = Path(out)
    asked = list(questions)
    keys = _keys(asked)
    done = _read(path)
    todo = [index for index, key in enumerate(keys) if key not in done]
    results: dict[Key, SearchResult] = {key: done[key] for key in keys if key in done}
    failed: list[BaseException] = []
    bar = _Bar(len(asked), len(asked) - len(todo), progress)
    with path.open("a", encoding="utf-8") as file, bar:
        places = iter(todo)

        async def worker() -> None:
            for index in places:
                try:
                    result = await fn(asked[index])
                except Exception as error:
                    failed.append(error)
                    group.cancel_scope.cancel()
                    return
                if result.stopped_by == "cancelled":
                    await anyio.lowlevel.checkpoint()
                    continue
                results[keys[index]] = result
                file.write(_line(asked[index], keys[index], result) + "\n")
                file.flush()
                bar.add(result)

        async with anyio.create_task_group() as group:
            for _ in range(min(concurrency, len(todo))):
                group.start_soon(worker)
    if failed:
        raise failed[0]
    return [results[key] for key in keys]


def _keys(questions: Sequence[Any]) -> list[Key]:
    """Each question as JSON, and how often it came before."""
    seen: Counter[str] = Counter()
    keys = []
    for index, question in enumerate(questions):
        try:
            text = json.dumps(question, sort_keys=True, ensure_ascii=False)
        except (TypeError, ValueError) as error:
            raise InvalidRequestError(
                f"question {index} cannot be written as JSON: {error}"
            ) from None
        keys.append((text, seen[text]))
        seen[text] += 1
    return keys


def _line(question: Any, key: Key, result: SearchResult) -> str:
    head = json.dumps({"question": question, "repeat": key[1]}, ensure_ascii=False)
    return f'{head[:-1]}, "result": {result.model_dump_json()}}}'


def _read(path: Path) -> dict[Key, SearchResult]:
    """The results that are there; a torn last line is cut off the file."""
    if not path.exists():
        return {}
    whole = path.read_bytes()
    body = whole[: whole.rfind(b"\n") + 1]
    if len(body) < len(whole):
        with path.open("r+b") as file:
            file.truncate(len(body))
    found: dict[Key, SearchResult] = {}
    for number, line in enumerate(body.decode("utf-8").splitlines(), 1):
        try:
            entry = json.loads(line)
            text = json.dumps(entry["question"], sort_keys=True, ensure_ascii=False)
            found[text, entry["repeat"]] = SearchResult.model_validate(entry["result"])
        except (ValueError, KeyError, TypeError) as error:
            raise InvalidRequestError(
                f"line {number} of {path.name} is no result of run_many ({error}): give out= "
                "another file"
            ) from None
    return found


class _Bar:
    """A tqdm bar on a terminal, or nothing."""

    def __init__(self, total: int, done: int, show: bool | None) -> None:
        import sys

        self._tqdm: Any = None
        self._tokens = self._computed = self._reused = 0
        if sys.stderr.isatty() if show is None else show:
            from tqdm import tqdm

            self._tqdm = tqdm(desc="questions", total=total, initial=done)

    def add(self, result: SearchResult) -> None:
        usage = result.usage
        self._tokens += usage.tokens_generated
        self._computed += usage.prompt_tokens_computed
        self._reused += usage.prompt_tokens_reused
        if self._tqdm is not None:
            elapsed = self._tqdm.format_dict["elapsed"] or 1e-9
            seen = self._computed + self._reused
            self._tqdm.set_postfix_str(
                f"{self._tokens / elapsed:.0f} tokens/s, "
                f"{100 * self._reused / seen if seen else 0:.0f}% reused",
                refresh=False,
            )
            self._tqdm.update(1)

    def __enter__(self) -> _Bar:
        return self

    def __exit__(self, *_: object) -> None:
        if self._tqdm is not None:
            self._tqdm.close()
