"""``python -m acceptance.clients.python_program``: calls as JSON on standard input, outcomes on standard output."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from acceptance.clients.python_clients import CLIENTS, Client
from acceptance.clients.refusals import Call

_PACE = 0.005
"""Seconds between two calls: the first steps of all at once would take longer than some clients wait for a connection."""


async def _outcome(client: Client, call: Call) -> dict[str, Any]:
    try:
        if call["operation"] == "turns":
            return {"turns": await client.turns(call["urls"], call["key"])}
        await client.ask(call)
    except Exception as error:  # noqa: BLE001 - whatever a client may raise
        code, status = getattr(error, "code", None), getattr(error, "status_code", None)
        return {"error": type(error).__name__, "text": str(error), "code": code, "status": status}
    return {"error": None, "text": "", "code": None, "status": None}


async def _main(calls: list[Call]) -> list[dict[str, Any]]:
    clients = {name: CLIENTS[name]() for name in {call["client"]: None for call in calls}}
    try:
        running = []
        for call in calls:
            running.append(asyncio.ensure_future(_outcome(clients[call["client"]], call)))
            await asyncio.sleep(_PACE)
        return await asyncio.gather(*running)
    finally:
        for client in clients.values():
            await client.close()


if __name__ == "__main__":
    output, sys.stdout = sys.stdout, sys.stderr  # LiteLLM prints
    output.write(json.dumps(asyncio.run(_main(json.load(sys.stdin)))))
