"""``homeport demo``: what happens to follow-ups over two replicas and two upstreams, without homeport and with it."""
