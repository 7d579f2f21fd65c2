"""``python -m homeport.testing.provider``: serve one stand-in and print its URL."""

from __future__ import annotations

import argparse
import socket
import sys

from homeport.testing.provider import create_provider

__all__ = ["main"]


def main(arguments: list[str] | None = None) -> None:
    """Serve until a signal comes; the first line on standard output is the URL."""
    parser = argparse.ArgumentParser(prog="python -m homeport.testing.provider", description=__doc__)
    parser.add_argument("--name", default="a", help="appears in every answer")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0: any free port")
    parser.add_argument("--tokens", type=int, default=5, help="text deltas of an answer")
    parser.add_argument("--token-delay", type=float, default=0.0, help="seconds before each")
    parser.add_argument(
        "--background-delay", type=float, default=0.0, help="seconds that a background job is queued before it begins"
    )
    parser.add_argument("--api-key", help="refuse requests without it")
    options = parser.parse_args(arguments)

    import uvicorn  # lazily: an extra, and slow to import

    app = create_provider(
        options.name,
        token_delay=options.token_delay,
        background_delay=options.background_delay,
        tokens=options.tokens,
        api_key=options.api_key,
    )
    listener = socket.create_server((options.host, options.port))
    host, port = listener.getsockname()[:2]
    sys.stdout.write(f"http://{host}:{port}\n")
    sys.stdout.flush()
    # A connection that is cut on purpose is logged as an error by the server: not worth a traceback here.
    server = uvicorn.Server(uvicorn.Config(app, log_level="critical", access_log=False, server_header=False))
    server.run(sockets=[listener])


if __name__ == "__main__":
    main()
