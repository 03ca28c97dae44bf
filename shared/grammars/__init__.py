"""Structured output: grammars checked by pods, compiled by workers, run token by token by the engine (llguidance)."""
