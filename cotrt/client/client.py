"""`Client`: a cotrt server, as a maker of branches."""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from cotrt.client.branch import RemoteBranch
from cotrt.client.branches import RemoteBranches
from cotrt.client.errors import server_error
from cotrt.client.plain import plain_ids
from cotrt.errors import InvalidRequestError


class Client:
    """A cotrt server, as a maker of branches.

        client = Client("http://127.0.0.1:8000")
        with client.branch("Question: ...").fork(4) as branches:
            outputs = branches.generate(max_tokens=64).result()

    Safe to use from several threads. A server's branch lives on a lease: it ends when nobody has
    used it for ``ttl`` seconds.

    Args:
        base_url: of the server, "http://host:port".
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
            OSError: the server cannot be reached.
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
            OSError: the server cannot be reached.
        """
        found = self._call("GET", "/v1/branches")["data"]
        return RemoteBranches(self, [RemoteBranch(self, about) for about in found])

    def models(self) -> list[str]:
        """Names of the server's model.

        Raises:
            CotrtError: the server refused or failed.
            OSError: the server cannot be reached.
        """
        return [model["id"] for model in self._call("GET", "/v1/models")["data"]]

    # ---- inside -------------------------------------------------------------------------------

    def _open(self) -> http.client.HTTPConnection:
        kind = (
            http.client.HTTPSConnection
            if self._parts.scheme == "https"
            else http.client.HTTPConnection
        )
        connection = kind(str(self._parts.hostname), self._parts.port, timeout=self._timeout)
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
        connection.request(method, self._parts.path.rstrip("/") + path, data, headers)
        reply = connection.getresponse()
        if reply.status >= 300:
            raise server_error(reply.status, reply.read())
        return reply

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
            return json.loads(self._send(connection, method, path, body).read())
        finally:
            connection.close()
