"""``make demo-replica``: three processes that keep their responses to themselves, without homeport and with it."""
