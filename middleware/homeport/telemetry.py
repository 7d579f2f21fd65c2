"""Instruments of the OpenTelemetry API: low-cardinality attributes, never an id, a tenant or content (DESIGN.md 11)."""

from __future__ import annotations

from opentelemetry import metrics

__all__ = [
    "commit_seconds",
    "commits",
    "conflicts",
    "decisions",
    "history_dropped",
    "history_moves",
    "history_reads",
    "hold_seconds",
    "lookup_seconds",
    "lookups",
    "open_sockets",
    "open_streams",
    "store_errors",
]

_meter = metrics.get_meter("homeport")

lookups = _meter.create_counter("homeport.lookups", description="Selectors looked up, by source and outcome")
decisions = _meter.create_counter("homeport.decisions", description="Decisions, by operation and outcome")
commits = _meter.create_counter("homeport.commits", description="Commits, by outcome")
conflicts = _meter.create_counter("homeport.conflicts", description="Writes refused because another owner was first")
history_reads = _meter.create_counter("homeport.history.reads", description="Histories read, to be replayed or shown")
history_moves = _meter.create_counter("homeport.history.moves", description="Replays as an owner is gone, by owner")
history_dropped = _meter.create_counter(
    "homeport.history.dropped", description="Items that could not be replayed and can be left out, by type"
)
store_errors = _meter.create_counter("homeport.store.errors", description="Failed store operations, by operation")
lookup_seconds = _meter.create_histogram("homeport.lookup.duration", unit="s", description="Time of store lookups")
commit_seconds = _meter.create_histogram("homeport.commit.duration", unit="s", description="Time of commits")
hold_seconds = _meter.create_histogram(
    "homeport.hold.duration", unit="s", description="How long a terminal event waited for its commit"
)
open_streams = _meter.create_up_down_counter("homeport.streams.open", description="Streamed responses in progress")
open_sockets = _meter.create_up_down_counter("homeport.sockets.open", description="WebSockets that are open")
