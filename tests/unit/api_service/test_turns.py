"""Turns: one request a round of the event loop, in order, whoever gives up; and which bodies are prepared at once."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest

from api_service.schemas.chat import ChatCompletionRequest
from api_service.schemas.common import parse
from api_service.schemas.completion import CompletionRequest
from api_service.turns import Turns

_ROUNDS = 200


class Rounds:
    """Counts the rounds of the running loop, by a callback that asks to be called again in the next one."""

    def __init__(self) -> None:
        self.number = 0
        self._loop = asyncio.get_running_loop()
        self._loop.call_soon(self._tick)

    def _tick(self) -> None:
        self.number += 1
        if self.number < _ROUNDS:
            self._loop.call_soon(self._tick)


async def begin(turns: Turns, rounds: Rounds, names: list[int], begun: list[tuple[int, int]]) -> None:
    async def one(name: int) -> None:
        await turns.take()
        begun.append((name, rounds.number))

    await asyncio.gather(*[one(name) for name in names])


async def test_a_crowd_begins_in_order_one_in_each_round() -> None:
    turns, rounds, begun = Turns(), Rounds(), list[tuple[int, int]]()
    await begin(turns, rounds, list(range(20)), begun)
    assert [name for name, _ in begun] == list(range(20))
    assert max(Counter(number for _, number in begun).values()) == 1
    assert begun[-1][1] - begun[0][1] <= 2 * 20  # and without rounds in which nobody could


async def test_whoever_comes_alone_does_not_wait() -> None:
    turns = Turns()
    for _ in range(3):
        taking = turns.take()
        with pytest.raises(StopIteration):
            taking.send(None)  # it ends without having waited for anything
        await asyncio.sleep(0)


async def test_those_who_give_up_hold_up_nobody() -> None:
    turns, rounds, begun = Turns(), Rounds(), list[tuple[int, int]]()
    left = [asyncio.create_task(turns.take()) for _ in range(5)]
    rest = asyncio.create_task(begin(turns, rounds, [1, 2, 3], begun))
    await asyncio.sleep(0)  # all but the first one wait now
    for task in left:
        task.cancel()
    await rest
    assert [name for name, _ in begun] == [1, 2, 3]
    assert [task.cancelled() for task in left] == [False, True, True, True, True]


IDS: dict[str, Any] = {"model": "m", "prompt": [1, 2, 3]}


@pytest.mark.parametrize(
    ("more", "quick"),
    [
        ({}, True),
        ({"prompt": [[1], [2]], "stop": "x", "n": 2, "logprobs": 1}, True),
        ({"prompt": "text"}, False),
        ({"prompt": ["a", "b"]}, False),
        ({"echo": True}, False),
        ({"suffix": "end"}, False),
        ({"bad_words": ["no"]}, False),
        ({"response_format": {"type": "json_object"}}, False),
        ({"structured_outputs": {"regex": "a*"}}, False),
        ({"guided_json": {"type": "object"}}, False),
        ({"guided_regex": "a*"}, False),
        ({"guided_choice": ["a"]}, False),
        ({"guided_grammar": "root ::= 'a'"}, False),
    ],
)
def test_only_what_needs_no_tokenizer_and_no_grammar_is_quick(more: dict[str, Any], quick: bool) -> None:
    assert parse(CompletionRequest, IDS | more).quick is quick


def test_a_chat_is_not_quick() -> None:
    assert not parse(ChatCompletionRequest, {"model": "m", "messages": [{"role": "user", "content": "hi"}]}).quick
