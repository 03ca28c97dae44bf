"""A client that streams completions and notes when each event came. In: prompts of token ids. Out: `Answer`s.

Works against every server with OpenAI's /v1/completions. Prompts are random ordinary tokens, seeded, so that no run is
served from another run's prefix cache; the end-of-sequence token is ignored, so that every server does the same work.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import aiohttp

__all__ = ["Answer", "Client", "Prompts"]

_FIRST_WORD, _LAST_WORD = 1_000, 40_000
"""Token ids of ordinary words in the default model's vocabulary: neither bytes nor control tokens."""
_TIMEOUT_S = 900.0


class Prompts:
    """Seeded prompts of an exact number of tokens."""

    def __init__(self, seed: str) -> None:
        self._rng = random.Random(seed)

    def make(self, tokens: int) -> list[int]:
        return [self._rng.randrange(_FIRST_WORD, _LAST_WORD) for _ in range(tokens)]


@dataclass(slots=True)
class Answer:
    """One streamed answer; times in seconds of time.perf_counter."""

    asked: int
    prompt_tokens: int
    sent: float = 0.0
    arrivals: list[float] = field(default_factory=list)
    """Of events that carry tokens."""
    tokens: int = 0
    """As the server's usage counts them."""
    cached_tokens: int = 0
    error: str = ""
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the first token came, or none will."""

    @property
    def ok(self) -> bool:
        return not self.error and self.tokens == self.asked

    @property
    def ttft(self) -> float:
        """Seconds from sending to the first event."""
        return self.arrivals[0] - self.sent

    @property
    def tpot(self) -> float:
        """Seconds per output token after the first."""
        return (self.arrivals[-1] - self.arrivals[0]) / max(1, self.tokens - 1)

    @property
    def gaps(self) -> list[float]:
        """Seconds between events."""
        return [later - earlier for earlier, later in zip(self.arrivals, self.arrivals[1:], strict=False)]


class Client:
    """One connection per request: some servers close kept-alive ones under the client's feet."""

    def __init__(self, base_url: str, model: str) -> None:
        """`base_url` without /v1."""
        self._url = f"{base_url}/v1/completions"
        self._model = model

    async def __aenter__(self) -> Self:
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        self._session = aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=_TIMEOUT_S))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._session.close()

    async def stream(self, prompt: list[int], tokens: int, answer: Answer | None = None) -> Answer:
        """One greedy answer of exactly `tokens` tokens; what went wrong is in `error`.

        `answer`, if given, is filled while the tokens come.
        """
        answer = answer or Answer(tokens, len(prompt))
        body = self._body(prompt, tokens)
        answer.sent = time.perf_counter()
        try:
            async with self._session.post(self._url, json=body) as response:
                if response.status != 200:
                    answer.error = f"HTTP {response.status}: {(await response.text())[:300]}"
                async for line in response.content:
                    if response.status == 200 and line.startswith(b"data:"):
                        self._note(answer, line[5:].strip(), time.perf_counter())
        except (aiohttp.ClientError, TimeoutError) as error:
            answer.error = f"{type(error).__name__}: {error}"
        if not answer.arrivals and not answer.error:
            answer.error = "no token came"
        answer.begun.set()
        return answer

    def _body(self, prompt: list[int], tokens: int) -> dict[str, Any]:
        return {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }

    @staticmethod
    def _note(answer: Answer, data: bytes, now: float) -> None:
        if data == b"[DONE]":
            return
        event = json.loads(data)
        if "error" in event:
            answer.error = str(event["error"])[:300]
        if usage := event.get("usage"):
            answer.tokens = usage["completion_tokens"]
            answer.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        choices = event.get("choices") or []
        # A closing event with a finish reason and no text is no token; an empty text in between is one.
        if choices and not (choices[0].get("finish_reason") and not choices[0].get("text")):
            answer.arrivals.append(now)
            answer.begun.set()
