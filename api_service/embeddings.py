"""Records of an embedding request's log -> OpenAI's list of vectors.

In: a GenerateRequest and its records in order. Out: the bytes of a list object, vectors as numbers or as base64 of
little-endian float32.
"""

from __future__ import annotations

import base64
import sys
from array import array
from typing import Any

from api_service.chunks import terminal_error
from api_service.sse import json_bytes
from shared.errors import EngineFailure, HeadraceError
from shared.messages import GenerateRequest, Record, Usage

__all__ = ["EmbeddingAnswer"]


class EmbeddingAnswer:
    """Folds records until the terminal one; then either `error` or `body()` is the answer."""

    def __init__(self, request: GenerateRequest, *, as_base64: bool) -> None:
        self._request = request
        self._as_base64 = as_base64
        self._vectors: dict[int, bytes] = {}
        self._usage = Usage()
        self.error: HeadraceError | None = None

    def add(self, record: Record) -> None:
        self._vectors |= {delta.index: delta.embedding for delta in record.deltas if delta.embedding}
        if record.end is not None:
            self._usage = record.end.usage
            self.error = terminal_error(record)
            if self.error is None and len(self._vectors) < self._request.num_choices:
                self.error = EngineFailure("The worker that ran this request computes no embeddings.")

    def body(self) -> bytes:
        """Only after a terminal record without error."""
        tokens = self._usage.prompt_tokens
        data = [
            {"object": "embedding", "index": index, "embedding": self._spelled(self._vectors[index])}
            for index in range(self._request.num_choices)
        ]
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        return json_bytes({"object": "list", "data": data, "model": self._request.model, "usage": usage})

    def _spelled(self, vector: bytes) -> Any:
        if self._as_base64:
            return base64.b64encode(vector).decode()
        numbers = array("f", vector)
        if sys.byteorder == "big":
            numbers.byteswap()
        return numbers.tolist()
