"""Settings of a pod, from variables HEADRACE_<FIELD> (redis_url also from REDIS_URL); frozen, checked at start.

In: the environment. Out: one `Settings`; `describe_errors` words a refusal for the person who set the variable.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from api_service.tenants import load_tenants
from shared.keys import RETENTION_MS

__all__ = ["Settings", "describe_errors"]

_REDIS_SCHEMES = ("redis://", "rediss://", "unix://")


class Settings(BaseSettings):
    """All a pod can be told. Times are in the unit of their suffix."""

    model_config = SettingsConfigDict(env_prefix="HEADRACE_", frozen=True, extra="ignore")

    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65535)
    redis_url: str = Field(default_factory=lambda: os.environ.get("REDIS_URL", "redis://127.0.0.1:6379/0"))
    """HEADRACE_REDIS_URL, else REDIS_URL."""
    api_key: Annotated[tuple[str, ...], NoDecode] = Field(default=(), repr=False)
    """Keys that clients may send; once there is one, every route but the probes asks for it."""
    api_key_file: Path | None = None
    """More keys, one a line."""
    max_body_bytes: int = Field(default=8 * 1024 * 1024, ge=1024)
    max_queue_requests: int = Field(default=1024, ge=1)
    max_queue_tokens: int = Field(default=4 * 1024 * 1024, ge=1)
    keepalive_s: float = Field(default=15.0, ge=0.05)
    """A silent stream gets a comment line this often."""
    retention_ms: int = Field(default=RETENTION_MS, ge=1000)
    drain_timeout_s: float = Field(default=10.0, ge=0)
    shards: int = Field(default=1, ge=1, le=64)
    max_streams: int = Field(default=1024, ge=1)
    """Requests this pod carries at once, streamed or not."""
    trust_request_chat_template: bool = False
    """Whether clients may send a chat template of their own; it is rendered in a process that can be ended."""
    parse_control_tokens: bool = False
    """Whether control tokens that a message spells out are such, where the request does not say."""
    seed: int | None = Field(default=None, ge=0, lt=1 << 63)
    """Seed of requests that bring none; None draws one for each."""
    metrics_port: int | None = Field(default=None, ge=0, le=65535)
    """/metrics is served there, on the same host, and nowhere else; None: beside the API."""
    root_path: str = ""
    cors_origins: Annotated[tuple[str, ...], NoDecode] = ()
    tenants: Path | None = None
    """File with weights and limits, see tenants.py."""
    prefix_affinity: bool = True
    """Offer a request first to the worker that has its prompt's beginning cached."""
    tool_call_parser: Literal["auto", "hermes", "llama3_json", "mistral", "pythonic", "json"] = "auto"
    """How models write tool calls; auto = by the chat template."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    timeout_keep_alive: int = Field(default=120, ge=1)
    max_header_bytes: int = Field(default=64 * 1024, ge=1024, le=1 << 24)
    """Request line and headers together."""
    header_timeout_s: float = Field(default=20.0, ge=0.1, le=3600)
    body_timeout_s: float = Field(default=120.0, ge=0.1, le=86_400)
    """From the end of the headers to the end of the body."""
    max_connections: int = Field(default=4096, ge=1, le=1_000_000)
    """Beyond it everything but the probes is refused."""

    @field_validator("api_key", "cors_origins", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        """Comma separated, as one variable holds it."""
        return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value

    @field_validator("redis_url")
    @classmethod
    def _known_scheme(cls, value: str) -> str:
        if not value.startswith(_REDIS_SCHEMES):
            raise ValueError("must be redis://HOST:PORT/DB, rediss://HOST:PORT/DB or unix:///PATH/TO/SOCKET")
        return value

    @field_validator("tenants")
    @classmethod
    def _usable_tenants(cls, value: Path | None) -> Path | None:
        load_tenants(value)
        return value

    @field_validator("root_path")
    @classmethod
    def _clean_root(cls, value: str) -> str:
        if value and (not value.startswith("/") or value.endswith("/")):
            raise ValueError("must begin with / and not end with one, such as /llm")
        return value

    @model_validator(mode="after")
    def _readable_keys(self) -> Settings:
        self.keys()
        return self

    def keys(self) -> tuple[str, ...]:
        """Every accepted key, from variable and file. Raises ValueError when the file cannot be read or is empty."""
        if self.api_key_file is None:
            return self.api_key
        try:
            lines = self.api_key_file.read_text(encoding="utf-8").split()
        except OSError as error:
            raise ValueError(f"api_key_file cannot be read: {error.strerror}") from None
        if not lines:
            raise ValueError("api_key_file holds no key")
        return (*self.api_key, *lines)


def describe_errors(error: ValidationError) -> str:
    """One line a bad setting: the variable, what it held, what is allowed."""
    lines = []
    for item in error.errors(include_url=False):
        field = str(item["loc"][0]).lower().removeprefix("headrace_") if item["loc"] else "api_key_file"
        held = "" if field.startswith("api_key") or not item["loc"] else f"={_shown(item['input'])!r}"
        reason = item["msg"].removeprefix("Value error, ").removeprefix("Input should be ").removeprefix("a valid ")
        lines.append(f"HEADRACE_{field.upper()}{held} is not allowed: {reason}")
    return "\n".join(lines)


def _shown(value: object) -> object:
    return str(value) if isinstance(value, Path) else value
