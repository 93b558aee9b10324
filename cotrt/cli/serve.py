"""`cotrt serve`: OpenAI's routes, branches over HTTP and a live page."""

from __future__ import annotations

import argparse
import logging
import os
import sys

from cotrt.cli.engine_flags import add_engine_flags, add_model_argument, engine_options, model_of

HELP = "serve a model over HTTP: OpenAI's routes, branches, a live page"
EXAMPLE = "cotrt serve smollm2-135m --port 8000 --api-key sk-mine"
NEEDS = "server"


def _port(text: str) -> int:
    port = int(text)
    if not 0 <= port <= 65535:
        raise argparse.ArgumentTypeError(f"{port} is not a port: 0 to 65535")
    return port


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_argument(parser)
    group = parser.add_argument_group("server")
    add = group.add_argument
    add("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    add("--port", type=_port, default=8000, help="port, 0 for a free one (default: %(default)s)")
    add(
        "--api-key",
        action="append",
        default=[],
        metavar="KEY",
        help="a key that requests must carry; may be repeated. Other users of this machine see "
        "it among the processes: the file or COTRT_API_KEY is safer",
    )
    add("--api-key-file", metavar="FILE", help="keys, one a line")
    add("--served-model-name", nargs="+", default=[], metavar="NAME", help="names in requests")
    add("--max-queue", type=int, default=1024, help="outputs that may wait (default: %(default)s)")
    add("--max-branches", type=int, default=4096, help="branches over HTTP in all")
    add("--max-branches-per-key", type=int, default=1024, help="branches over HTTP of one key")
    add("--branch-ttl", type=float, default=600.0, help="seconds a branch lives unused")
    add("--max-body-bytes", type=int, default=8 << 20, help="length of a request")
    add("--shutdown-timeout", type=float, default=30.0, help="seconds to drain after SIGTERM")
    add("--tool-call-parser", default="auto", help="auto, hermes, llama3_json or none")
    add("--reasoning-parser", default="think", help="think or none")
    add("--allowed-origins", nargs="+", default=[], metavar="URL", help="turn CORS on for these")
    add(
        "--log-level",
        default="info",
        choices=("debug", "info", "warning", "error"),
        help="of the log on stderr (default: %(default)s)",
    )
    add("--no-access-log", action="store_true", help="do not log requests")
    add_engine_flags(parser)


def run(options: argparse.Namespace) -> int:
    """Serve until SIGINT or SIGTERM.

    Returns:
        0.

    Raises:
        InvalidRequestError: it cannot listen there; no model was loaded then.
    """
    from cotrt import LLM
    from cotrt.server.listening import bind
    from cotrt.server.options import ServerOptions
    from cotrt.server.serving import serve

    logging.basicConfig(
        level=options.log_level.upper(),
        stream=sys.stderr,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    if options.no_access_log:
        logging.getLogger("cotrt.server.access").setLevel(logging.WARNING)
    model = model_of(options)
    server = ServerOptions(
        host=options.host,
        port=options.port,
        api_keys=_keys(options),
        served_model_names=tuple(options.served_model_name),
        max_queue=options.max_queue,
        max_branches=options.max_branches,
        max_branches_per_key=options.max_branches_per_key,
        default_ttl_s=options.branch_ttl,
        max_body_bytes=options.max_body_bytes,
        shutdown_timeout_s=options.shutdown_timeout,
        tool_call_parser=options.tool_call_parser,
        reasoning_parser=options.reasoning_parser,
        allowed_origins=tuple(options.allowed_origins),
    )
    sockets = bind(server.host, server.port)
    with LLM(model, **engine_options(options, lenient=True)) as llm:

        def say_where(port: int) -> None:
            logging.getLogger("cotrt").info(
                "serving %s on http://%s:%d (kernels: %s, context: %d tokens)",
                model,
                options.host,
                port,
                llm.kernels,
                llm.max_model_len,
            )

        return serve(llm, server, on_start=say_where, sockets=sockets)


def _keys(options: argparse.Namespace) -> tuple[str, ...]:
    keys = list(options.api_key)
    if options.api_key_file:
        with open(options.api_key_file, encoding="utf-8") as file:
            found = [line.strip() for line in file if line.strip()]
        if not found:
            from cotrt.errors import InvalidRequestError

            raise InvalidRequestError(f"--api-key-file {options.api_key_file} holds no key")
        keys += found
    if os.environ.get("COTRT_API_KEY"):
        keys.append(os.environ["COTRT_API_KEY"])
    return tuple(keys)
