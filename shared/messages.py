"""What travels through Redis, as msgpack: the request a pod queues and the records a worker appends.

Wire names are short and defaults are left out, so a one-token record is about 40 bytes. Decoding is strict: a message
that does not fit raises msgspec.ValidationError, and its reader treats the request as failed, never guesses. What is
made for every token is left to reference counting (gc=False): none of it can be part of a cycle.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from shared.params import SamplingParams, StopConditions

__all__ = [
    "Delta",
    "End",
    "FinishReason",
    "GenerateRequest",
    "ModelCard",
    "PromptLogprob",
    "Reading",
    "Record",
    "TokenLogprob",
    "Usage",
    "WorkerCard",
    "decode_record",
    "decode_request",
    "encode",
]

FinishReason = Literal["stop", "length", "abort", "error"]


class Reading(msgspec.Struct, frozen=True, omit_defaults=True):
    """How a chat answer's text is split into reasoning, content and tool calls: all a pod needs besides the log."""

    parser: str = ""
    """Format of tool calls: hermes, llama3_json, mistral, pythonic, json; "" = none are looked for."""
    names: tuple[str, ...] = ()
    """The functions on offer."""
    forced: bool = False
    """The answer is a JSON list of calls, by grammar."""
    named: str = ""
    """The answer is the arguments of this function, by grammar."""
    think: str = ""
    """"open": the answer begins inside <think>; "maybe": it may begin with one; "" = no reasoning."""


class GenerateRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """One accepted HTTP request: tokens in, parameters, stop conditions. Choice index = prompt position * n + j."""

    rid: str
    model: str
    prompts: tuple[tuple[int, ...], ...]
    sampling: SamplingParams
    stop: StopConditions
    n: int = 1
    klass: str = "interactive"
    tenant: str = ""
    created: int = 0
    """Unix seconds, the `created` of every chunk of the stream."""
    deadline_ms: int = 0
    """Unix milliseconds after which no prefill may start; 0 = none."""
    kind: str = "chat"
    """Endpoint that made it ("chat" or "completion"), so that any pod can rebuild its stream from the log."""
    echo: tuple[str, ...] = ()
    """Texts a completion stream begins with, one a prompt (`echo`), empty otherwise."""
    include_usage: bool = False
    continuous_usage: bool = False
    """Every chunk carries the usage so far (`stream_options.continuous_usage_stats`)."""
    fingerprint: str = ""
    """`system_fingerprint` of every chunk, fixed at submission so that a stream never changes it half-way."""
    tokenizer: str = ""
    """sha256 of the tokenizer.json blob: a pod that resumes the stream spells log-probabilities with it."""
    grace_ms: int = 0
    """How long the request goes on running after its client has gone (opt-in); 0 = a disconnect cancels."""
    priority: int = 0
    """Among the waiting requests of one share, and among the sequences of one worker: lower runs first."""
    cache_salt: str = ""
    """Cached prefixes are shared between requests of the same salt only."""
    prompt_logprobs: int | None = None
    """How many alternatives the answer's `prompt_logprobs` has; None: no such field."""
    return_token_ids: bool = False
    pooling: Literal["", "last", "mean"] = ""
    """Of an embedding request (`kind` "embedding"), one vector a prompt."""

    reading: Reading | None = None
    """None: the text is the content."""
    share: str = ""
    """Whose fair share of the service it comes out of, and whose limits it counts for; no blanks in it."""
    weight: float = 1.0
    """Of the share: with 2 it gets twice the tokens of one with 1 while both wait."""
    service_tier: str = ""
    """What the answer says of it; "" = nothing."""

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.n

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens as usage counts them: each prompt once, whatever n is."""
        return sum(map(len, self.prompts))

    @property
    def max_output_tokens(self) -> int:
        """Of all choices together."""
        return self.stop.max_tokens * self.num_choices


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Log-probability of one output token and of the best alternatives (natural log, finite; -9999 = impossible)."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class PromptLogprob(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Log-probability of one prompt token given those before it, and its rank (1 = the most probable)."""

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


class Delta(
    msgspec.Struct,
    frozen=True,
    omit_defaults=True,
    gc=False,
    rename={
        "index": "i",
        "token_ids": "t",
        "text": "x",
        "logprobs": "l",
        "finish_reason": "f",
        "stop_reason": "s",
        "prompt": "p",
        "embedding": "v",
        "reasoning": "r",
    },
):
    """What one choice gained in one record. `text` may be empty while characters or a possible stop are held back."""

    index: int = 0
    token_ids: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    """The stop string or token id that ended the choice, when the client asked for one."""
    prompt: tuple[PromptLogprob, ...] = ()
    """Of the next prompt tokens, the first one of a prompt left out; they come before the choice's own tokens."""
    embedding: bytes = b""
    """float32, little-endian, of unit length."""
    reasoning: int = 0
    """Reasoning tokens not told before: among these ids, or earlier ones of which it was not yet known."""


class Usage(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    """Of the completion tokens."""


class End(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """Closes the log. `code` is "" for a normal end, else a code of shared/errors.py with `message` for the caller."""

    code: str = ""
    message: str = ""
    usage: Usage = Usage()


class Record(msgspec.Struct, frozen=True, omit_defaults=True, gc=False, rename={"seq": "n", "deltas": "d", "end": "e"}):
    """Entry `seq` (0, 1, 2, …) of a request's log. The record with `end` is the last one, and there is exactly one."""

    seq: int
    deltas: tuple[Delta, ...] = ()
    end: End | None = None


class ModelCard(msgspec.Struct, frozen=True, omit_defaults=True):
    """All a pod knows of a model. Written by workers, same content from every worker of the same model."""

    name: str
    created: int
    max_model_len: int
    max_request_tokens: int
    """Prompt + output tokens of one choice that the paged cache can ever hold (usable blocks * block size)."""
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    tokenizer: str
    """sha256 of the tokenizer.json blob."""
    chat_template: str = ""
    """sha256 of the template blob, "" when the model has none."""
    special_tokens: dict[str, str] = {}
    """bos_token, eos_token, … as the template expects them."""
    add_bos: bool = False
    """Whether a plain completion prompt gets the BOS token in front."""
    defaults: dict[str, float] = {}
    """generation_config's temperature, top_p, top_k, … used where the client is silent."""
    architecture: str = ""
    dtype: str = ""
    fingerprint: str = ""
    """`system_fingerprint`: hash of weights' identity, dtype and engine version."""
    hidden_size: int = 0
    """Numbers of an embedding."""

    @property
    def window(self) -> int:
        """Tokens that prompt and answer may have together: the model's window, or the cache when that is smaller."""
        return min(self.max_model_len, self.max_request_tokens or self.max_model_len)


class WorkerCard(msgspec.Struct, frozen=True, omit_defaults=True):
    """A worker's heartbeat, refreshed about once a second."""

    worker_id: str
    model: str
    host: str = ""
    pid: int = 0
    started: int = 0
    state: str = "ready"
    """loading, ready or draining"""
    max_num_seqs: int = 0
    running: int = 0
    waiting: int = 0
    kv_blocks_used: int = 0
    """Held by requests; what else is cached makes room for them."""
    kv_blocks_total: int = 0
    kv_cache_bytes: int = 0
    """Memory of all blocks, reserved whether they are used or not."""
    steps: int = 0
    last_step_age_ms: int = 0
    tokens_per_s: float = 0.0
    counters: dict[str, float] = {}
    """Monotone totals for /metrics: prompt_tokens, generation_tokens, preemptions, takeovers, …"""
    histograms: dict[str, tuple[float, ...]] = {}
    """The same for distributions, see shared/histogram.py."""


_encoder = msgspec.msgpack.Encoder()
_record_decoder = msgspec.msgpack.Decoder(Record)
_request_decoder = msgspec.msgpack.Decoder(GenerateRequest)


def encode(message: msgspec.Struct) -> bytes:
    """msgpack bytes of any message of this module."""
    return _encoder.encode(message)


def decode_record(data: bytes) -> Record:
    """Raises msgspec.ValidationError or DecodeError on anything that is not a record."""
    return _record_decoder.decode(data)


def decode_request(data: bytes) -> GenerateRequest:
    """Raises msgspec.ValidationError or DecodeError on anything that is not a request."""
    return _request_decoder.decode(data)
