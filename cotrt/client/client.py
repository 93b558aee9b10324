"""`Client`: a cotrt server, as a maker of branches."""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

from cotrt.client.branch import RemoteBranch
from cotrt.client.branches import RemoteBranches
from cotrt.client.errors import reaching, server_error
from cotrt.client.plain import plain_ids
from cotrt.errors import CotrtError, InvalidRequestError


class Client:
    """A cotrt server, as a maker of branches.

        client = Client("http://127.0.0.1:8000")
        with client.branch("Question: ...").fork(4) as branches:
            outputs = branches.generate(max_tokens=64).result()

    Safe to use from several threads. A server's branch lives on a lease: it ends when nobody has
    used it for ``ttl`` seconds. As a context manager it is closed on leaving.

    Args:
        base_url: of the server, "http://host:port"; a "/v1" at its end is left out.
        api_key: where the server wants one.
        timeout: seconds that the server may be silent.

    Raises:
        InvalidRequestError: a URL that is none.
    """

    def __init__(
        self, base_url: str, *, api_key: str | None = None, timeout: float = 600.0
    ) -> None:
        parts = urlsplit(base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise InvalidRequestError(f"base_url={base_url!r}: must be like http://127.0.0.1:8000")
        self._parts = parts
        self._prefix = parts.path.rstrip("/").removesuffix("/v1")
        # Without what stands before the host, which may be a password.
        host = parts.netloc.rpartition("@")[2]
        self._url = f"{parts.scheme}://{host}{self._prefix}"
        self._is_closed = False
        self._api_key = api_key
        self._timeout = timeout

    def branch(
        self,
        prompt: str | Sequence[int] | Sequence[Mapping[str, Any]] = "",
        *,
        ttl: float | None = None,
    ) -> RemoteBranch:
        """A root branch on the server, as `LLM.branch`.

        Args:
            prompt: text, token ids, or chat messages.
            ttl: seconds that it lives on after its last use; by default the server's.

        Raises:
            InvalidRequestError, PromptTooLongError, KVCacheExhaustedError: the server refused it.
            CotrtError: too many branches, or the server failed.
            ConnectionError: the server cannot be reached (a CotrtError too).
        """
        if not isinstance(prompt, str) and len(prompt) and isinstance(prompt[0], Mapping):
            body: dict[str, Any] = {"messages": list(prompt)}
        else:
            body = {"prompt": prompt if isinstance(prompt, str) else plain_ids(prompt)}
        return RemoteBranch(self, self._call("POST", "/v1/branches", {**body, "ttl": ttl}))

    def branches(self) -> RemoteBranches:
        """All branches that this key has on the server.

        Raises:
            CotrtError: the server refused or failed.
            ConnectionError: the server cannot be reached (a CotrtError too).
        """
        found = self._call("GET", "/v1/branches")["data"]
        return RemoteBranches(self, [RemoteBranch(self, about) for about in found])

    def models(self) -> list[str]:
        """Names of the server's model.

        Raises:
            CotrtError: the server refused or failed.
            ConnectionError: the server cannot be reached (a CotrtError too).
        """
        return [model["id"] for model in self._call("GET", "/v1/models")["data"]]

    def close(self) -> None:
        """Refuse further calls. Work under way goes on, branches live on by their leases."""
        self._is_closed = True

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # ---- inside -------------------------------------------------------------------------------

    def _open(self) -> http.client.HTTPConnection:
        if self._is_closed:
            raise InvalidRequestError(f"the client of {self._url} was closed: make another")
        kind = (
            http.client.HTTPSConnection
            if self._parts.scheme == "https"
            else http.client.HTTPConnection
        )
        connection = kind(str(self._parts.hostname), self._parts.port, timeout=self._timeout)
        with reaching(self._url):
            connection.connect()
        return connection

    def _send(
        self, connection: http.client.HTTPConnection, method: str, path: str, body: Any
    ) -> http.client.HTTPResponse:
        headers = {"content-type": "application/json"}
        if self._api_key is not None:
            headers["authorization"] = f"Bearer {self._api_key}"
        data = None
        if body is not None:
            given = {name: value for name, value in body.items() if value is not None}
            data = json.dumps(given, allow_nan=False).encode()
        with reaching(self._url):
            connection.request(method, self._prefix + path, data, headers)
            reply = connection.getresponse()
            if reply.status < 300:
                return reply
            told = reply.read()
        raise server_error(reply.status, told)

    def _call(
        self,
        method: str,
        path: str,
        body: Any = None,
        link: Callable[[http.client.HTTPConnection], None] = lambda connection: None,
    ) -> Any:
        connection = self._open()
        try:
            link(connection)
            reply = self._send(connection, method, path, body)
            with reaching(self._url):
                told = reply.read()
            return json.loads(told)
        except json.JSONDecodeError as error:
            raise CotrtError(f"{self._url}{path} answered what is no JSON: {error}") from error
        finally:
            connection.close()
