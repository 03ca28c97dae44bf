"""The renderer without the rest of transformers: what a pod does not import, and that others still can."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys
from api_service.prepare.renderer import render_jinja_template
print("transformers" in sys.modules, "transformers.models" in sys.modules)
text, _ = render_jinja_template([[{"role": "user", "content": "hi"}]], chat_template="{{ messages[0].content }}!")
print(text)
import transformers
from transformers import LlamaConfig
import transformers.utils.chat_template_utils as theirs
print(bool(transformers.__version__),
      LlamaConfig(num_hidden_layers=3).num_hidden_layers, theirs.render_jinja_template is render_jinja_template)
"""


def test_only_the_renderer_is_imported_and_all_of_it_can_be_later() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.splitlines() == ["False False", "['hi!']", "True 3 True"]
