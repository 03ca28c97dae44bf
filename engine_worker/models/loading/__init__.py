"""From what a user names to a `LoadedModel`."""

from engine_worker.errors import LoadError
from engine_worker.models.loading.checkpoint import Progress
from engine_worker.models.loading.loader import load

__all__ = ["LoadError", "Progress", "load"]
