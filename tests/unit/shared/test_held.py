"""The quarantine: what may start, and who waits for whom."""

from __future__ import annotations

import asyncio

from shared.held import HeldRequests


def _held(*rids: str, tries: int = 1) -> HeldRequests:
    held = HeldRequests()
    for rid in rids:
        held.reserve(rid)
        held.acquired(rid, 1, tries)
    return held


def test_only_the_suspect_itself_may_start_while_it_is_unproved() -> None:
    held = _held("a", tries=2)
    assert held.may_start("a")
    assert not held.may_start("b")
    held.prove("a")
    assert held.may_start("b")
    assert "a" in held


def test_dropping_an_old_acquisition_leaves_the_new_one() -> None:
    held = _held("a")
    held.acquired("a", 3, 1)
    held.drop("a", 1)
    assert "a" in held
    held.drop("a", 3)
    assert "a" not in held
    assert not held.unproved


def test_a_reservation_counts_as_unproved_until_it_is_given_up() -> None:
    held = HeldRequests()
    held.reserve("a")
    assert held.unproved
    assert "a" in held
    held.drop("a")
    assert not held.unproved


def test_an_expected_suspect_closes_the_door_until_it_is_forgotten() -> None:
    held = HeldRequests()
    held.expect("s")
    assert not held.may_start("b")
    held.forget("s")
    assert held.may_start("b")


async def test_readers_wait_for_the_proof_and_no_longer() -> None:
    held = _held("a", tries=2)
    waiting = asyncio.create_task(held.wait_open(30))
    await asyncio.sleep(0)
    held.prove("a")
    assert await asyncio.wait_for(waiting, 5)


async def test_readers_make_room_for_a_waiting_suspect_only_as_long_as_something_is_unproved() -> None:
    held = _held("a")
    held.make_room(30)
    assert not await held.wait_open(0.001)
    held.prove("a")
    assert await held.wait_open(0)


async def test_making_room_ends_by_itself_or_when_no_suspect_waits() -> None:
    held = _held("a")
    held.make_room(0.01)
    assert await held.wait_open(5)
    held.make_room(30)
    held.open()
    assert await held.wait_open(0)
