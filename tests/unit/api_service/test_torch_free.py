"""Pods never import torch, the engine or the kernels: not for the app, not for rendering a template."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys
import api_service.app
from tests.support.served import served
from api_service.prepare.render import encode_chat, render_chat
text = render_chat(served(), [{"role": "user", "content": "hi"}], add_generation_prompt=True,
                   continue_final_message=False, kwargs={})
assert encode_chat(served(), text)
print(sorted(name for name in sys.modules if name.split(".")[0] in ("torch", "triton", "engine_worker", "kernels")))
"""


def test_nothing_of_torch_or_the_engine_is_imported() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr == ""
    assert done.stdout.strip() == "[]"
