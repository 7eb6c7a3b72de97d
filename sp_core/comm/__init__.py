"""Transports: ways to move shards between ranks, behind one small interface."""

from .transport import Transport, TransportStats
from .transports.collective import CollectiveTransport

__all__ = ["CollectiveTransport", "Transport", "TransportStats"]
