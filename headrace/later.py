"""Modules that are imported when something of them is first used: `serve` is to have its programs on their way, which
take longest, before it imports the libraries that it talks to them with."""

from __future__ import annotations

import sys
from importlib.util import LazyLoader, find_spec, module_from_spec
from types import ModuleType

__all__ = ["later"]


def later(name: str) -> ModuleType:
    """The module `name`, which runs at the first look at one of its attributes; at once when it is imported already.

    Raises ModuleNotFoundError when there is none. The first look must not come from two threads at once.
    """
    if name in sys.modules:
        return sys.modules[name]
    spec = find_spec(name)
    if spec is None or spec.loader is None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    spec.loader = LazyLoader(spec.loader)
    module = module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    package, _, part = name.rpartition(".")
    if package:
        setattr(sys.modules[package], part, module)
    return module
