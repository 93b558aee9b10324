"""Sockets to listen on, taken before a model is loaded, and why they could not be."""

from __future__ import annotations

import contextlib
import errno
import socket

from cotrt.errors import InvalidRequestError


def bind(host: str, port: int) -> list[socket.socket]:
    """One socket for each address of `host`, bound and not yet listening.

    Until it listens a connection is refused, so that nobody takes a server that loads for one that
    serves.

    Args:
        host: a name or an address; empty for every one of the machine.
        port: 0 takes a free one, the same for all addresses.

    Raises:
        InvalidRequestError: the port is in use or not allowed, or the host is not of this machine.
    """
    try:
        infos = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except OSError as error:
        raise InvalidRequestError(f"--host {host}: no such address: {error.strerror}") from error
    bound: list[socket.socket] = []
    failed: OSError | None = None
    with contextlib.ExitStack() as on_error:
        for family, kind, protocol, _, address in dict.fromkeys(infos):
            if bound:  # the port that the first was given
                address = (address[0], bound[0].getsockname()[1], *address[2:])
            try:
                bound.append(on_error.enter_context(_bound(family, kind, protocol, address)))
            except OSError as error:
                if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                    raise cannot_listen(host, port, error) from error
                failed = error  # a name may have an address that the machine does not
        if not bound:
            assert failed is not None
            raise cannot_listen(host, port, failed) from failed
        on_error.pop_all()
    return bound


def cannot_listen(host: str, port: int, error: OSError) -> InvalidRequestError:
    """What to tell of an address that could not be taken."""
    where = f"cannot listen on {host or 'any address'}, port {port}"
    if error.errno == errno.EADDRINUSE:
        return InvalidRequestError(
            f"{where}: another program uses the port; stop it, or give another one with --port "
            "(0 takes a free one)"
        )
    if error.errno == errno.EACCES:
        return InvalidRequestError(
            f"{where}: the system does not allow it; give a port of 1024 or more with --port"
        )
    if error.errno == errno.EADDRNOTAVAIL:
        return InvalidRequestError(
            f"{where}: the address is not one of this machine; give another one with --host"
        )
    return InvalidRequestError(f"{where}: {error.strerror or error}")


def _bound(family: int, kind: int, protocol: int, address: tuple[object, ...]) -> socket.socket:
    made = socket.socket(family, kind, protocol)
    try:
        # The port of a server that has just ended may be taken, whatever its last connections do.
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        made.bind(address)
    except BaseException:
        made.close()
        raise
    return made
