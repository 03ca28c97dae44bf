"""Settings of a worker process, read from HEADRACE_* environment variables (`REDIS_URL` is accepted too), checked once.

In: the environment. Out: a frozen WorkerSettings, or one line per bad value with its name and what is allowed.
"""

from __future__ import annotations

import os
import re
import secrets
import socket
from typing import Annotated, Literal

from pydantic import AfterValidator, AliasChoices, BeforeValidator, Field, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from shared.keys import RETENTION_MS
from shared.simulation import parse_simulation

__all__ = ["SettingsError", "WorkerSettings", "read_settings"]

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", re.IGNORECASE)
_REDIS_SCHEMES = ("redis://", "rediss://", "unix://")


class SettingsError(Exception):
    """The settings cannot be used; the message has one line per bad value."""


def _parse_size(value: object) -> object:
    """ "512M" -> 536870912; anything else is left to pydantic's own integer check."""
    match = _SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
    return int(float(match[1]) * _UNITS[match[2].upper()]) if match else value


def _check_redis_url(value: str) -> str:
    if not value.startswith(_REDIS_SCHEMES):
        raise ValueError(f"must begin with {', '.join(_REDIS_SCHEMES)}")
    return value


def _check_simulation(value: str) -> str:
    if value:
        parse_simulation(value)
    return value


def _default_worker_id() -> str:
    return f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"


ByteSize = Annotated[int, BeforeValidator(_parse_size)]
RedisUrl = Annotated[str, AfterValidator(_check_redis_url)]


class WorkerSettings(BaseSettings):
    """Field `max_num_seqs` is the variable HEADRACE_MAX_NUM_SEQS and the flag --max-num-seqs."""

    model_config = SettingsConfigDict(env_prefix="HEADRACE_", frozen=True, env_ignore_empty=True, populate_by_name=True)

    model: str = ""
    """Hugging Face directory, hub id, .gguf file, or "" for the default model."""
    served_model_name: str = ""
    """Name in /v1/models; "" takes the model's own name."""
    redis_url: RedisUrl = Field(
        default="redis://127.0.0.1:6379/0",
        validation_alias=AliasChoices("HEADRACE_REDIS_URL", "REDIS_URL"),
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    quantization: Literal["auto", "none", "gguf", "int8", "q8_0", "q4_0", "q4_1"] = "auto"
    """How weights are kept; docs/quantization.md."""
    max_model_len: int | None = Field(default=None, ge=1)
    """Prompt + output tokens of one choice; None takes the model's window."""
    max_num_seqs: int = Field(default=64, ge=1, le=4096)
    max_num_batched_tokens: int = Field(default=576, ge=1, le=1 << 20)
    target_itl_ms: float = Field(default=0.0, ge=0, le=60_000)
    """Wanted time between two tokens of a running stream while prompts are computed; 0 = none."""
    block_size: int = Field(default=16, ge=1, le=1024)
    kv_cache_memory: ByteSize = Field(default=1 << 30, ge=1 << 16)
    """Bytes; the suffixes K, M, G, T are powers of 1024."""
    kv_cache_dtype: Literal["auto", "float32", "bfloat16", "int8"] = "auto"
    """What the KV cache holds; auto is `dtype`."""
    batch_invariant: bool = False
    """Whether a request's tokens may not depend, bit by bit, on what it runs with."""
    lease_ms: int = Field(default=10_000, ge=200, le=3_600_000)
    """How long a silent worker keeps its requests before others may take them."""
    step_limit_ms: int = Field(default=60_000, ge=100, le=3_600_000)
    """A single engine step longer than this counts as hung: leases are no longer renewed."""
    drain_timeout_ms: int = Field(default=2_000, ge=100, le=600_000)
    shards: int = Field(default=1, ge=1, le=100)
    max_tries: int = Field(default=2, ge=1, le=100)
    """Deliveries without progress after which a request counts as poisoned."""
    retention_ms: int = Field(default=RETENTION_MS, ge=1_000, le=86_400_000)
    worker_id: str = Field(default_factory=_default_worker_id, min_length=1, max_length=200)
    threads: int = Field(default=0, ge=0, le=1024)
    """CPU threads of the engine; 0 = all cores this process may use."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    enable_prefix_caching: bool = True
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    simulate: Annotated[str, AfterValidator(_check_simulation)] = ""
    """Pace of made-up tokens instead of a model, see shared/simulation.py; "" runs the model."""
    fault: str = ""
    """A fault for tests, see docs/testing.md; "" in production."""


def read_settings() -> WorkerSettings:
    """The settings of this process. Raises SettingsError."""
    try:
        return WorkerSettings()
    except ValidationError as error:
        raise SettingsError(_explain(error)) from None


def _explain(error: ValidationError) -> str:
    """One line per bad value: variable, value, what is allowed."""
    lines = []
    for detail in error.errors(include_url=False):
        name = str(detail["loc"][0])
        variable = name if name.isupper() else f"HEADRACE_{name.upper()}"
        message = detail["msg"].removeprefix("Value error, ")
        shown = "***" if "REDIS_URL" in variable else repr(detail["input"])  # a URL may carry a password
        lines.append(f"{variable}={shown}: {message[:1].lower()}{message[1:]}")
    return "\n".join(lines)
