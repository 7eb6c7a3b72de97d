"""The base of every error whose text a person can be shown as it is."""

from __future__ import annotations


class SPError(RuntimeError):
    """Says what happened, on which rank, and what to do."""
