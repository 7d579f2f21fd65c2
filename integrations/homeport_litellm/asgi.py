"""LiteLLM's app with homeport in it, for your own server: ``uvicorn homeport_litellm.asgi:app``.

LiteLLM finds its configuration by ``CONFIG_FILE_PATH`` or ``WORKER_CONFIG``. The server must run lifespans.
"""

from litellm.proxy.proxy_server import app

from homeport_litellm.mount import mount

__all__ = ["app"]

mount(app)
