"""What shapes the engine: few numbers, frozen, checked when made. The worker fills it from its settings."""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["EngineConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Raises ValueError naming the field and what is allowed when a value is out of range."""

    block_size: int = 16
    """Token slots of one block of the KV cache."""
    kv_cache_memory: int = 1 << 30
    """Bytes for the KV cache; decides the number of blocks."""
    num_blocks: int | None = None
    """Blocks of the KV cache, instead of counting them from `kv_cache_memory`."""
    max_num_seqs: int = 64
    """Requests in one batch at most. Never more than the token budget, so that every decode fits into every step."""
    max_num_batched_tokens: int = 576
    """Tokens computed in one step at most (the token budget). See `spare_tokens`."""
    max_model_len: int | None = None
    """Prompt + output tokens of one request at most; None: the model's own context window, and never more than that."""
    enable_prefix_caching: bool = True
    target_itl_ms: float = 0.0
    """Wanted milliseconds between two tokens of a running request while prompts are computed; 0: no target."""

    def __post_init__(self) -> None:
        for name in ("block_size", "kv_cache_memory", "max_num_seqs", "max_num_batched_tokens"):
            _at_least(name, getattr(self, name), 1)
        if not 0 <= self.target_itl_ms < math.inf:
            raise ValueError(f"target_itl_ms is {self.target_itl_ms}, allowed is a number of milliseconds, 0 for none")
        for name in ("num_blocks", "max_model_len"):
            if (value := getattr(self, name)) is not None:
                _at_least(name, value, 1)

    @property
    def max_running(self) -> int:
        """Requests that may hold blocks at once: each can always go on by at least one token a step."""
        return min(self.max_num_seqs, self.max_num_batched_tokens)

    @property
    def spare_tokens(self) -> int:
        """Of the budget, what only the end of a prompt is given, where more prompts wait than decodes run: a small rest
        is not worth a step of its own. Whole 16 tokens, none of a small budget."""
        return min(self.max_num_batched_tokens // 9, max(0, self.max_num_batched_tokens - self.max_num_seqs)) // 16 * 16

    def count_blocks(self, bytes_per_block: int) -> int:
        """Blocks of the cache. Raises ValueError when the memory does not hold a single one."""
        if self.num_blocks is not None:
            return self.num_blocks
        if self.kv_cache_memory < bytes_per_block:
            raise ValueError(
                f"kv_cache_memory is {self.kv_cache_memory} bytes, but one block of {self.block_size} tokens takes "
                f"{bytes_per_block}: allowed is at least that much, sensible are some hundred blocks"
            )
        return self.kv_cache_memory // bytes_per_block


def _at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise ValueError(f"{name} is {value}, allowed is {least} or more")
