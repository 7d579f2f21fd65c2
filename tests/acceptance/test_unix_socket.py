"""The literal `unix` in HOMEPORT_TRUSTED_PROXIES (DESIGN.md section 4), on a real socket."""

from __future__ import annotations

import subprocess
import sys
import time

import httpx

from support.servers import run_provider


def test_a_peer_on_a_unix_socket_is_trusted_as_unix_only(tmp_path) -> None:
    import os

    with run_provider("a") as provider:
        outcomes = []
        for number, trusted in enumerate(("unix", "127.0.0.1")):
            path = tmp_path / f"{number}.sock"
            env = {
                **os.environ,
                "HOMEPORT_UPSTREAMS": f"a={provider.url}",
                "HOMEPORT_DATABASE_URL": "memory://",
                "HOMEPORT_TENANT_MODE": "headers",
                "HOMEPORT_TENANT_HEADERS": "x-tenant",
                "HOMEPORT_SECRETS": "a-secret-of-the-state-store",
                "HOMEPORT_TRUSTED_PROXIES": trusted,
            }
            command = [sys.executable, "-m", "homeport", "serve", "--uds", str(path)]
            with subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
                deadline = time.monotonic() + 20
                while not path.exists() and time.monotonic() < deadline:
                    time.sleep(0.05)
                with httpx.Client(
                    transport=httpx.HTTPTransport(uds=str(path), retries=20), base_url="http://x"
                ) as client:
                    answer = client.post("/v1/responses", json={"model": "m", "input": "x"}, headers={"x-tenant": "t"})
                outcomes.append((answer.status_code, answer.headers.get("x-homeport-outcome")))
                server.terminate()
        assert outcomes == [(200, None), (401, "tenant_untrusted")]
