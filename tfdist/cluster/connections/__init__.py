"""Connections between the processes of a job: messages, a proof that both ends belong, a listener, how to connect."""

from __future__ import annotations

from tfdist.cluster.connections.attempts import UnreachedError, keep_trying
from tfdist.cluster.connections.connection import Connection, drain, framed, leave_without_trace, receive, send
from tfdist.cluster.connections.handshake import ENDS, OtherVersionError, authenticate
from tfdist.cluster.connections.listener import Listener

__all__ = [
    "ENDS",
    "Connection",
    "Listener",
    "OtherVersionError",
    "UnreachedError",
    "authenticate",
    "drain",
    "framed",
    "keep_trying",
    "leave_without_trace",
    "receive",
    "send",
]
