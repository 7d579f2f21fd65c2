"""Apps whose Responses state lives in one process: visible, cancellable and resumable from any replica."""

from homeport_replica.middleware import ReplicaMiddleware

__all__ = ["ReplicaMiddleware"]
