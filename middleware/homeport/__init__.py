"""homeport: a follow-up reaches the upstream that holds its state, or is refused before routing."""
