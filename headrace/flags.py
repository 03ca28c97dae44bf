"""Every flag of the command line, declared once: name, environment variable, what is allowed, what it is for.

In: nothing. Out: groups of `Flag`. Programs check their settings again: they also run alone.
"""

from __future__ import annotations

from typing import Literal

from headrace.flag import Flag, takes
from headrace.flag_checks import key_file, name, redis_url, root_path, simulation, size

__all__ = ["API", "COMMON", "REDIS_URL", "SAMPLING", "SERVE", "WORKER", "Flag", "takes"]

_QUEUE = "Redis and queue"
_API = "API"

REDIS_URL = Flag(
    "redis_url",
    str,
    "Redis or Valkey server, 7.0 or newer.",
    "unset",
    check=redis_url,
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
    Flag("served_model_name", str, "Name of the model in the API.", "from the model's files", check=name),
    Flag("dtype", Literal["auto", "float32", "bfloat16", "float16"], "Type that weights are computed in.", "auto"),
    Flag(
        "quantization",
        Literal["auto", "none", "gguf", "int8", "q8_0", "q4_0", "q4_1"],
        "How weights are kept: as the file has them (auto with bfloat16, gguf), in full (none), or quantized at load.",
        "auto",
    ),
    Flag("max_model_len", int, "Longest prompt + answer, in tokens.", "the model's own", 1),
    Flag("max_num_seqs", int, "Sequences that run at the same time.", "64", 1, 4096),
    Flag(
        "max_num_batched_tokens",
        int,
        "Tokens computed in one engine step at most; the last ninth is for the ends of prompts.",
        "576",
        1,
        1 << 20,
    ),
    Flag(
        "target_itl_ms",
        float,
        "Wanted time between two tokens of a running stream, in ms: long prompts are cut so that it holds; 0 = off.",
        "0",
        0,
        60_000,
    ),
    Flag("block_size", int, "Tokens in a block of the paged KV cache.", "16", 1, 1024),
    Flag("kv_cache_memory", str, "Memory for the KV cache, in bytes or with K, M, G.", "1G", check=size),
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
    Flag(
        "threads",
        int,
        "Threads of each engine; 0 = one per core, with serve less those that API and Redis need.",
        "0",
        0,
        1024,
    ),
    Flag("device", Literal["auto", "cpu", "cuda"], "Where the model runs.", "auto"),
    Flag(
        "simulate",
        str,
        "Say made-up tokens at this pace instead of running a model: tokens_per_s=N (all streams together), "
        "stream_tokens_per_s=N, ttft_ms=N, answer_tokens=N, seed=N, separated by commas. For load tests; needs no "
        "weights and no torch.",
        "off",
        check=simulation,
        panel="Process",
    ),
    Flag("worker_id", str, "Name of this worker in the queue.", "host-pid-random", check=name, panel=_QUEUE),
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
    Flag("api_key_file", str, "File with one key a line.", "none", check=key_file, panel=_API),
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
    Flag("root_path", str, "Path prefix that a proxy strips.", "none", check=root_path, panel=_API),
    Flag("cors_origins", list[str], "Origins that browsers may call from; repeat it.", "none", panel=_API),
)

SERVE = (
    Flag("workers", int, "Worker processes.", "1", 1, panel="Process"),
    Flag(
        "data_dir",
        str,
        "Where the embedded Redis keeps queue and streams over a restart.",
        "a temporary directory, removed at the end",
        panel=_QUEUE,
    ),
)

SAMPLING = (
    Flag(
        "temperature",
        float,
        "0 always takes the likeliest.",
        "the model's own, else 0.4",
        0,
        2,
        variable=False,
        panel="Options",
    ),
    Flag("top_p", float, "Share that is kept.", "the model's own, else 0.9", 0, 1, variable=False, panel="Options"),
)
