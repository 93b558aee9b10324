"""A generate that runs on a server, and its pieces as they come."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any

from cotrt.client.errors import ServerUnreachableError, reaching, server_error
from cotrt.client.handle import RemoteHandle
from cotrt.client.results import completion_of, logprobs_of
from cotrt.outputs import Chunk, CompletionOutput

if TYPE_CHECKING:
    from cotrt.client.branch import RemoteBranch
    from cotrt.sampling.logprobs import Logprob


class RemoteGeneration(RemoteHandle[CompletionOutput]):
    """A running generate on the server; as `cotrt.Generation`.

    After ``g.cancel()`` its result has what had come by then, with finish_reason "abort"; the
    branch may have a few tokens more.
    """

    def __init__(self, branch: RemoteBranch, body: Mapping[str, Any]) -> None:
        self._chunks: list[Chunk] = []
        # One dict a token, where they were asked for.
        self._logprobs: list[dict[int, Logprob]] | None = (
            None if body.get("logprobs") is None else []
        )
        self._grown = threading.Condition()
        super().__init__(lambda link: self._run(branch, body, link))

    def _run(
        self, branch: RemoteBranch, body: Mapping[str, Any], link: Callable[[Any], None]
    ) -> CompletionOutput:
        client = branch._client
        connection: http.client.HTTPConnection | None = None
        try:
            connection = client._open()
            link(connection)
            reply = client._send(
                connection, "POST", branch._path("generate"), {**body, "stream": True}
            )
            for line in _lines(reply, client._url):
                if line.startswith(b"data: {"):
                    event = json.loads(line[6:])
                    if "error" in event:
                        raise server_error(500, line[6:])
                    if "output" in event:
                        return completion_of(event["output"])
                    chunk = Chunk(event["text"], event["token_ids"], event["token_logprobs"])
                    with self._grown:
                        self._chunks.append(chunk)
                        if "logprobs" in event:
                            self._logprobs = (self._logprobs or []) + logprobs_of(event["logprobs"])
                        self._grown.notify_all()
            raise ServerUnreachableError(f"{client._url} ended the stream before the work was done")
        except (OSError, http.client.HTTPException, ValueError):
            if not self._cancelled:
                raise
            return self._partial()
        finally:
            if connection is not None:
                connection.close()

    def _end(self) -> None:
        with self._grown:  # so that no reader goes to wait meanwhile
            super()._end()
            self._grown.notify_all()

    def _partial(self) -> CompletionOutput:
        return CompletionOutput(
            index=0,
            text="".join(chunk.text for chunk in self._chunks),
            token_ids=[i for chunk in self._chunks for i in chunk.token_ids],
            cumulative_logprob=sum(value for chunk in self._chunks for value in chunk.logprobs),
            logprobs=self._logprobs,
            finish_reason="abort",
        )

    def __iter__(self) -> Iterator[Chunk]:
        seen = 0
        while True:
            with self._grown:
                self._grown.wait_for(lambda at=seen: len(self._chunks) > at or self.done)  # type: ignore[misc]
                if len(self._chunks) == seen:
                    break
                chunk = self._chunks[seen]
            seen += 1
            yield chunk
        self.result()

    async def __aiter__(self) -> AsyncIterator[Chunk]:
        import anyio.to_thread

        chunks = iter(self)
        end = object()
        while True:
            chunk = await anyio.to_thread.run_sync(next, chunks, end, abandon_on_cancel=True)
            if chunk is end:
                return
            assert isinstance(chunk, Chunk)
            yield chunk

    def __enter__(self) -> RemoteGeneration:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.cancel()


def _lines(reply: http.client.HTTPResponse, url: str) -> Iterator[bytes]:
    with reaching(url):
        yield from reply
