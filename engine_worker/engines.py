"""Which engine a worker runs: a model's, or a simulated one. The loader is imported only once it is known.

In: settings. Out: a warm engine. A simulated engine must run where torch is not installed, and a model's worker shows
signs of life before torch, which takes seconds to import, is there.
"""

from __future__ import annotations

from importlib import import_module

from engine_worker.settings import WorkerSettings
from engine_worker.warm import WarmEngine

__all__ = ["load_engine"]

_MODEL = "engine_worker.loading"
_SIMULATED = "engine_worker.simulate.loading"


def load_engine(settings: WorkerSettings) -> WarmEngine:
    """Blocks for as long as loading takes. Raises LoadError or ValueError, both with a message for the operator."""
    loader = import_module(_SIMULATED if settings.simulate else _MODEL)
    warm: WarmEngine = loader.load_engine(settings)
    return warm
