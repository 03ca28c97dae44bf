"""Models by architecture name, and the loader that fills them. `engine_worker.models.loading.load` is the way in."""

from engine_worker.errors import LoadError
from engine_worker.layers.rope import RopeConfig
from engine_worker.models.base import LoadedModel, Model
from engine_worker.models.config import ModelConfig

__all__ = ["LoadError", "LoadedModel", "Model", "ModelConfig", "RopeConfig"]
