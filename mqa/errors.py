"""Errors and warnings that callers may want to catch by type."""

from __future__ import annotations


class BackendUnavailableError(RuntimeError):
    """No backend, or not the one asked for, can run this call on this device.

    The message lists every reason of every backend considered and names those that can.
    """


class FallbackWarning(UserWarning):
    """The slow reference runs on a GPU because no other backend accepts the call."""
