"""Models by architecture name, and the loader that fills them. `load` is the way in."""

from engine_worker.models.base import LoadedModel, Model
from engine_worker.models.config import ModelConfig, RopeConfig
from engine_worker.models.errors import LoadError

__all__ = ["LoadError", "LoadedModel", "Model", "ModelConfig", "RopeConfig"]
