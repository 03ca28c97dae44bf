"""Which blocks a request holds. The scheduler's hand in the cache: the only code that writes `Request.block_table`.

In: requests that begin, grow, have computed something, or end. Out: whether there is room, and how much was found
cached. Only full blocks are shared and their content never changes, so nothing is ever copied. No torch: ids only.
"""

from __future__ import annotations

from collections.abc import Iterable

from engine_worker.cache.block_pool import BlockPool, OutOfBlocks
from engine_worker.cache.prefix_index import Prefix, PrefixIndex, extend, root
from engine_worker.request import Request

__all__ = ["CacheManager"]


class CacheManager:
    """Blocks of `block_size` tokens for every running request; full blocks of finished ones stay until room is needed.

    `model_key` tells apart cached content of different models, revisions or adapters.
    """

    def __init__(
        self, num_blocks: int, block_size: int, *, enable_prefix_caching: bool = True, model_key: str = ""
    ) -> None:
        self.block_size = block_size
        self._index = PrefixIndex()
        self._pool = BlockPool(num_blocks, on_evict=self._index.forget)
        self._caching = enable_prefix_caching
        self._model_key = model_key
        # request id -> its full blocks as prefixes, as far as they are known; kept while it waits, so hashed once.
        self._chains: dict[str, list[Prefix]] = {}
        # Digests of blocks that rows of the step being planned will fill: not readable before the next step.
        self._in_flight: set[bytes] = set()

    @property
    def pool(self) -> BlockPool:
        """For statistics and tests; only this manager changes it."""
        return self._pool

    @property
    def capacity_tokens(self) -> int:
        """Tokens that one request alone can ever hold. No block is reserved for anything else."""
        return self._pool.num_blocks * self.block_size

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def lacking(self, request: Request, reserve: int = 0) -> int:
        """How many blocks too few there are for `begin` if `reserve` are to stay available after it; <= 0: it fits."""
        hits = self._match(request)
        missing = self.blocks_for(request.num_tokens) - len(hits)
        available = self._pool.num_available - sum(map(self._pool.is_cached, hits))
        return missing + reserve - available

    def begin(self, request: Request) -> int:
        """Gives a request without blocks those for all its known tokens, cached ones first.

        Returns how many tokens need no computing (always fewer than it knows). Raises OutOfBlocks when it does not fit
        (see `lacking`); then nothing was taken.
        """
        hits = self._match(request)
        missing = self.blocks_for(request.num_tokens) - len(hits)
        self._pool.share(hits)
        try:
            request.block_table = hits + self._pool.allocate(missing)
        except OutOfBlocks:
            self._pool.release(reversed(hits))
            raise
        return len(hits) * self.block_size

    def grow(self, request: Request) -> bool:
        """Makes sure of a slot for the newest known token; False when that takes a block and none is available."""
        if request.num_tokens <= len(request.block_table) * self.block_size:
            return True
        if not self._pool.num_available:
            return False
        request.block_table += self._pool.allocate(1)
        return True

    def computed(self, request: Request, before: int) -> None:
        """`request.num_computed_tokens` went up from `before`: blocks filled by that can be found from now on."""
        first, last = before // self.block_size, request.num_computed_tokens // self.block_size
        if first == last or not self._caching:
            return
        chain = self._chain(request, last)
        for position in range(first, last):
            block = request.block_table[position]
            prefix = chain[position].under(chain[position - 1]) if position else chain[0]
            if self._index.insert(prefix, block):
                self._pool.keep(block)
            elif found := self._index.find(prefix):
                # Someone else computed the same: theirs is the one to find, and descendants hang under it.
                prefix = found[0]
            chain[position] = prefix

    def release(self, request: Request, *, discard: bool = False) -> None:
        """Takes back all blocks of a request that ended or lost them; safe to call again.

        `discard`: its content may be broken and is not to be found by others.
        """
        self._chains.pop(request.request_id, None)
        blocks, request.block_table = request.block_table, []
        if discard:
            for block in blocks:
                self._index.forget(block)
                self._pool.discard(block)
        # Last block first: a prefix is evicted from its end, so what stays can still be matched.
        self._pool.release(reversed(blocks))

    def start_step(self) -> None:
        """A new plan begins; what the last one computed has been reported by `computed`."""
        self._in_flight.clear()

    def announce(self, request: Request, end: int) -> None:
        """The plan computes `request` up to `end` (exclusive): its new full blocks become readable after the step."""
        if self._caching:
            chain = self._chains[request.request_id]
            filled = chain[request.num_computed_tokens // self.block_size : end // self.block_size]
            self._in_flight.update(prefix.digest for prefix in filled if self._index.find(prefix) is None)

    def awaits_prefix(self, request: Request) -> bool:
        """Whether this step computes a block that the request needs: a step later it is a hit, now double work."""
        if not self._in_flight:
            return False
        usable = self._usable_blocks(request)
        return any(prefix.digest in self._in_flight for prefix in self._chain(request, usable)[:usable])

    def check_integrity(self, running: Iterable[Request]) -> None:
        """Pool, index and the running requests' tables agree. Raises AssertionError with what is wrong."""
        self._pool.check_integrity()
        self._index.check_integrity()
        references = [0] * self._pool.num_blocks
        for request in running:
            for block in request.block_table:
                references[block] += 1
        wrong = [block for block, count in enumerate(references) if count != self._pool.references(block)]
        lost = [block for block in self._index.blocks() if not self._pool.is_kept(block)]
        if wrong or lost:
            raise AssertionError(f"blocks held by nobody or counted wrongly: {wrong}; indexed but not kept: {lost}")

    def _usable_blocks(self, request: Request) -> int:
        # At least one token is left to compute: the next token is drawn from its logits.
        return min(request.num_tokens - 1, request.num_measured) // self.block_size

    def _match(self, request: Request) -> list[int]:
        """Blocks of the longest cached prefix; what matched becomes the indexed prefixes, to keep checks cheap."""
        if not self._caching:
            return []
        usable = self._usable_blocks(request)
        chain = self._chain(request, usable)
        blocks: list[int] = []
        for position in range(usable):
            prefix = chain[position].under(chain[position - 1]) if position else chain[0]
            found = self._index.find(prefix)
            if found is None:
                break
            chain[position], block = found
            blocks.append(block)
        return blocks

    def _chain(self, request: Request, length: int) -> list[Prefix]:
        """The request's prefixes, at least `length` of them."""
        chain = self._chains.setdefault(request.request_id, [])
        if len(chain) < length:
            parent = chain[-1] if chain else root(("model", self._model_key), ("salt", request.cache_salt))
            start = len(chain) * self.block_size
            tokens = _known_tokens(request, start, length * self.block_size)
            for offset in range(0, len(tokens), self.block_size):
                parent = extend(parent, tokens[offset : offset + self.block_size])
                chain.append(parent)
        return chain


def _known_tokens(request: Request, start: int, end: int) -> list[int]:
    """Tokens start … end - 1 of prompt + output."""
    num_prompt = len(request.prompt_token_ids)
    outputs = request.output_token_ids[max(start - num_prompt, 0) : max(end - num_prompt, 0)]
    return request.prompt_token_ids[start:end] + outputs
