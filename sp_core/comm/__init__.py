"""Transports: ways to move shards between ranks, behind one small interface."""

from .collective import CollectiveTransport
from .transport import Transport, TransportStats

__all__ = ["CollectiveTransport", "Transport", "TransportStats"]
