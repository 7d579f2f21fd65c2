"""``make demo-litellm``: follow-ups over two stock LiteLLM proxies, without homeport and with it."""
