"""``make demo-history``: a tool loop through LiteLLM, at upstreams that keep no state, and at one that is lost."""
