"""The engine's own errors, below the client-visible ones of shared/errors.py."""

from __future__ import annotations

__all__ = ["LoadError"]


class LoadError(Exception):
    """A model cannot be loaded. The message is for whoever named the model: what is wrong, and with which file or
    field."""
