"""transformers' own renderer of chat templates, without the index of all its models: that takes a quarter of a pod's
start to make, and is made whenever any part of transformers is imported as usual.

Nothing else imports transformers here; who does so afterwards gets all of it, as ever.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from importlib.util import find_spec
from types import ModuleType

__all__ = [
    "control_token_patterns",
    "encode_marked_chat",
    "mark_control_tokens",
    "render_jinja_template",
    "template_literal_text",
]


@contextmanager
def _bare_package(name: str) -> Iterator[None]:
    """Meanwhile parts of the package `name` are imported without what the package itself would import first.

    Does nothing when it is imported already, or not installed.
    """
    spec = None if name in sys.modules else find_spec(name)
    if spec is None or spec.submodule_search_locations is None:
        yield
        return
    bare = ModuleType(name)
    bare.__spec__ = spec
    bare.__path__ = list(spec.submodule_search_locations)
    bare.__dict__["__version__"] = version(name)
    sys.modules[name] = bare
    try:
        yield
    finally:
        del sys.modules[name]


with _bare_package("transformers"):
    from transformers.utils.chat_template_utils import (
        _get_control_token_patterns as control_token_patterns,
    )
    from transformers.utils.chat_template_utils import (
        _get_template_literal_text as template_literal_text,
    )
    from transformers.utils.chat_template_utils import (
        encode_marked_chat,
        mark_control_tokens,
        render_jinja_template,
    )
