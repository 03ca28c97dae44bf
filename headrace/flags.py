"""Every flag of the command line, declared once: name, environment variable, what is allowed, what it is for.

In: nothing. Out: groups of `Flag`, and the decorator `takes`, which gives a command its flags and hands it those that
were set as environment variables of the program it starts. Programs check their settings again: they also run alone.
"""

from __future__ import annotations

import inspect
import math
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from shared.simulation import parse_simulation

__all__ = ["API", "COMMON", "REDIS_URL", "WORKER", "Flag", "takes"]

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", re.IGNORECASE)
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_SMALLEST_CACHE = 1 << 16
_CREDENTIALS = re.compile(r"//[^/@]*@")
_NAME = re.compile(r"[\w./:@+-]+")


@dataclass(frozen=True)
class Flag:
    """One setting. `field` "max_num_seqs" is flag --max-num-seqs and variable HEADRACE_MAX_NUM_SEQS."""

    field: str
    kind: Any
    """Type of one value as typer takes it: int, float, str, bool, a Literal, or list[str] for a repeatable flag."""
    help: str
    default: str
    """What holds when the flag is absent, for --help; the programs own the value itself."""
    low: float | None = None
    high: float | None = None
    check: Callable[[str], str | None] | None = None
    """Says what is allowed when the value is not, else None."""
    envs: tuple[str, ...] = ()
    panel: str = "Engine"

    @property
    def env(self) -> str:
        """The variable that the programs read."""
        return f"HEADRACE_{self.field.upper()}"

    @property
    def option(self) -> str:
        return "--" + self.field.replace("_", "-")

    def parameter(self) -> inspect.Parameter:
        """This flag as a keyword parameter of a typer command; None when it is absent."""
        names = f"{self.option}/--no-{self.option[2:]}" if self.kind is bool else self.option
        info = typer.Option(
            names,
            envvar=list(self.envs) or self.env,
            help=self.help,
            show_default=self.default,
            metavar=self._range(".."),
            callback=self._checked,
            rich_help_panel=self.panel,
        )
        annotation: Any = Annotated[(self.kind | None, info)]
        return inspect.Parameter(self.field, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)

    def spelled(self, value: object) -> str:
        """The value as an environment variable holds it."""
        if isinstance(value, list | tuple):
            return ",".join(part.strip() for item in value for part in str(item).split(",") if part.strip())
        return str(value).lower() if isinstance(value, bool) else str(value)

    def _range(self, joint: str) -> str | None:
        if self.low is None:
            return None
        return f"{self.low:g}{joint}{self.high:.9g}" if self.high is not None else f"{self.low:g}{joint}".strip()

    def _checked(self, context: typer.Context, value: Any) -> Any:
        """typer's callback: the value, if it may be used."""
        if value is None:
            return None
        allowed = self.check(value) if self.check else None
        if self.low is not None and not self.low <= value <= (math.inf if self.high is None else self.high):
            allowed = f"a number from {self._range(' to ')}" if self.high is not None else f"{self.low:g} or more"
        if allowed:
            shown = _CREDENTIALS.sub("//***@", value) if isinstance(value, str) else value
            raise typer.BadParameter(f"{shown!r} is not allowed: {allowed}.", param_hint=self._given_as(context))
        return value

    def _given_as(self, context: typer.Context) -> str:
        """What the person wrote it as: the flag, or the variable that held the value."""
        source = context.get_parameter_source(self.field)
        if source is not None and source.name == "COMMANDLINE":
            return f"'{self.option}'"
        held = [name for name in self.envs or (self.env,) if os.environ.get(name)]
        return f"'{held[0]}' (the variable of {self.option})" if held else f"'{self.option}'"


def takes(*flags: Flag) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Gives a typer command these flags. It receives `settings`: variable name -> value of each flag that was set."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.name != "settings"]
        parameters = [*own, *(flag.parameter() for flag in flags)]

        @wraps(command)
        def run(**values: Any) -> None:
            given = {flag: values.pop(flag.field) for flag in flags}
            command(**values, settings={f.env: f.spelled(v) for f, v in given.items() if v is not None and v != []})

        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        return run

    return decorate


def _size(value: str) -> str | None:
    match = _SIZE.fullmatch(value.strip())
    if match is None:
        return "a number of bytes, with K, M or G if you like (1G, 512M, 1073741824)"
    return None if float(match[1]) * _UNITS[match[2].upper()] >= _SMALLEST_CACHE else "64K or more"


def _key_file(value: str) -> str | None:
    try:
        return None if Path(value).read_text(encoding="utf-8").split() else "a file with at least one key"
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text in UTF-8"
        return f"a file that can be read ({reason})"


def _redis_url(value: str) -> str | None:
    good = value.startswith(("redis://", "rediss://", "unix://"))
    return None if good else "redis://HOST:PORT/DB, rediss://HOST:PORT/DB or unix:///PATH/TO/SOCKET"


def _name(value: str) -> str | None:
    return None if _NAME.fullmatch(value) else "letters, digits and . _ / : @ + -"


def _simulation(value: str) -> str | None:
    try:
        parse_simulation(value)
    except ValueError as error:
        return str(error)
    return None


def _root_path(value: str) -> str | None:
    return None if value == "" or (value.startswith("/") and not value.endswith("/")) else "a path such as /llm"


_QUEUE = "Redis and queue"
_API = "API"

REDIS_URL = Flag(
    "redis_url",
    str,
    "Redis or Valkey server, 7.0 or newer.",
    "unset",
    check=_redis_url,
    envs=("HEADRACE_REDIS_URL", "REDIS_URL"),
    panel=_QUEUE,
)

COMMON = (
    REDIS_URL,
    Flag("shards", int, "Queue shards; the same number in every process.", "1", 1, 64, panel=_QUEUE),
    Flag(
        "retention_ms",
        int,
        "How long a finished stream can be replayed, in ms.",
        "300000",
        1000,
        86_400_000,
        panel=_QUEUE,
    ),
    Flag("log_level", Literal["debug", "info", "warning", "error"], "What is logged.", "info", panel="Process"),
)

WORKER = (
    Flag("served_model_name", str, "Name of the model in the API.", "from the model's files", check=_name),
    Flag("dtype", Literal["auto", "float32", "bfloat16", "float16"], "Type that weights are computed in.", "auto"),
    Flag(
        "quantization",
        Literal["auto", "none", "gguf", "int8", "q8_0", "q4_0", "q4_1"],
        "How weights are kept: as the file has them (auto with bfloat16, gguf), in full (none), or quantized at load.",
        "auto",
    ),
    Flag("max_model_len", int, "Longest prompt + answer, in tokens.", "the model's own", 1),
    Flag("max_num_seqs", int, "Sequences that run at the same time.", "64", 1, 4096),
    Flag("max_num_batched_tokens", int, "Token budget of one engine step.", "512", 1, 1 << 20),
    Flag(
        "target_itl_ms",
        float,
        "Wanted time between two tokens of a running stream, in ms: long prompts are cut so that it holds; 0 = off.",
        "0",
        0,
        60_000,
    ),
    Flag("block_size", int, "Tokens in a block of the paged KV cache.", "16", 1, 1024),
    Flag("kv_cache_memory", str, "Memory for the KV cache, in bytes or with K, M, G.", "1G", check=_size),
    Flag(
        "kv_cache_dtype",
        Literal["auto", "float32", "bfloat16", "int8"],
        "Type that the KV cache holds; int8 has room for almost twice the tokens of bfloat16.",
        "auto: the model's",
    ),
    Flag(
        "batch_invariant",
        bool,
        "Make a request's tokens the same bit by bit whatever it runs with; costs some speed.",
        "off",
    ),
    Flag("enable_prefix_caching", bool, "Share the KV cache of equal prompt beginnings.", "on"),
    Flag("threads", int, "Threads of the engine; 0 = one per core.", "0", 0, 1024),
    Flag("device", Literal["auto", "cpu", "cuda"], "Where the model runs.", "auto"),
    Flag(
        "simulate",
        str,
        "Say made-up tokens at this pace instead of running a model: tokens_per_s=N (all streams together), "
        "stream_tokens_per_s=N, ttft_ms=N, answer_tokens=N, seed=N, separated by commas. For load tests; needs no "
        "weights and no torch.",
        "off",
        check=_simulation,
        panel="Process",
    ),
    Flag("worker_id", str, "Name of this worker in the queue.", "host-pid-random", check=_name, panel=_QUEUE),
    Flag(
        "lease_ms",
        int,
        "A worker that is silent this long loses its requests to others, in ms.",
        "10000",
        200,
        3_600_000,
        panel=_QUEUE,
    ),
    Flag(
        "step_limit_ms",
        int,
        "An engine step longer than this counts as hung, in ms.",
        "60000",
        100,
        3_600_000,
        panel=_QUEUE,
    ),
    Flag(
        "max_tries",
        int,
        "Deliveries without progress before a request is put aside as a dead letter.",
        "2",
        1,
        100,
        panel=_QUEUE,
    ),
    Flag(
        "drain_timeout_ms",
        int,
        "Time a worker has to hand its requests back when it is stopped, in ms.",
        "2000",
        100,
        600_000,
        panel=_QUEUE,
    ),
)

API = (
    Flag("host", str, "Address to listen on; 0.0.0.0 = every one.", "127.0.0.1", panel=_API),
    Flag("port", int, "Port to listen on.", "8000", 0, 65535, panel=_API),
    Flag(
        "api_key",
        list[str],
        "Key that clients must send; repeat it, or separate several by commas.",
        "none",
        panel=_API,
    ),
    Flag("api_key_file", str, "File with one key a line.", "none", check=_key_file, panel=_API),
    Flag("max_body_bytes", int, "Largest request body, in bytes.", "8388608", 1024, panel=_API),
    Flag("max_streams", int, "Streams this pod carries at the same time.", "1024", 1, panel=_API),
    Flag("seed", int, "Seed of requests that bring none.", "a random one each", 0, panel=_API),
    Flag("trust_request_chat_template", bool, "Let clients send a chat template with a request.", "off", panel=_API),
    Flag(
        "parse_control_tokens",
        bool,
        "Read control tokens that messages spell out as such, not as text; a request may say so itself.",
        "off",
        panel=_API,
    ),
    Flag("prefix_affinity", bool, "Offer requests first to workers that have their prefix cached.", "on", panel=_API),
    Flag("tenants", str, "File (TOML or JSON) with weights and limits of tenants.", "none", panel=_API),
    Flag("max_queue_requests", int, "Waiting requests before new ones get 429.", "1024", 1, panel=_QUEUE),
    Flag("max_queue_tokens", int, "Waiting tokens before new requests get 429.", "4194304", 1, panel=_QUEUE),
    Flag(
        "tool_call_parser",
        Literal["auto", "hermes", "llama3_json", "mistral", "pythonic", "json"],
        "How models write tool calls; auto asks their chat template.",
        "auto",
        panel=_API,
    ),
    Flag("keepalive_s", float, "Seconds of silence after which a stream gets a comment line.", "15", 0.05, panel=_API),
    Flag("drain_timeout_s", float, "Seconds that running streams get when the pod is stopped.", "10", 0, panel=_API),
    Flag("timeout_keep_alive", int, "Seconds that an idle connection stays open.", "120", 1, panel=_API),
    Flag("max_header_bytes", int, "Largest request line with headers, in bytes.", "65536", 1024, 1 << 24, panel=_API),
    Flag("header_timeout_s", float, "Seconds in which a request's headers must arrive.", "20", 0.1, 3600, panel=_API),
    Flag("body_timeout_s", float, "Seconds in which a request's body must arrive.", "120", 0.1, 86_400, panel=_API),
    Flag("max_connections", int, "Open connections before new ones get 503.", "4096", 1, 1_000_000, panel=_API),
    Flag("metrics_port", int, "Port of /metrics alone.", "beside the API", 0, 65535, panel=_API),
    Flag("root_path", str, "Path prefix that a proxy strips.", "none", check=_root_path, panel=_API),
    Flag("cors_origins", list[str], "Origins that browsers may call from; repeat it.", "none", panel=_API),
)
