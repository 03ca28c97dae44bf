"""Rules about the scripts that can be read off their text, and the one calculation in them that has an oracle."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

import shared.scripts
from shared import keys
from shared.scripts import Script
from tests.support.redis_server import RedisServer

FOLDER = Path(shared.scripts.__file__).parent
FILES = sorted(FOLDER.glob("[!_]*.lua"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_script_says_what_it_takes_answers_and_why(path: Path) -> None:
    text = path.read_text()
    for heading in ("-- KEYS", "-- ARGV", "-- Reply", "-- Why"):
        assert heading in text
    assert hasattr(shared.scripts, path.stem.upper())


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.lua")), ids=lambda path: path.stem)
def test_no_script_spells_a_key_or_unpacks_what_is_unbounded(path: Path) -> None:
    text = path.read_text()
    assert "hr:" not in text
    assert "'KEYS'" not in text
    for argument in re.findall(r"unpack\(([^)]*)\)", text):
        assert argument in ("KEYS", "ARGV, 1, 5", "args", "entry[2][2]", "last[2]", "known[2]")
    for line in text.splitlines():
        assert len(line) <= 120


def test_the_ledgers_day_is_the_calendars(redis_server: RedisServer) -> None:
    """Every day of 40 years, and the seconds around midnight."""
    body = Script("bury").text.split("local req, log,")[0]
    body += "\nlocal days = {}\nfor i = 1, #ARGV do days[i] = utc_day(tonumber(ARGV[i])) end\nreturn days"
    start = datetime(2020, 1, 1, tzinfo=UTC)
    moments = [start + timedelta(days=n) for n in range(40 * 365)]
    moments += [moment - timedelta(seconds=1) for moment in moments[1:2000]]
    client = redis_server.client()
    days = client.eval(body, 0, *(int(moment.timestamp()) for moment in moments))
    client.close()
    assert [day.decode() for day in days] == [f"{moment:%Y%m%d}" for moment in moments]


def test_all_names_of_a_request_share_one_hash_tag() -> None:
    rid = keys.new_rid(7)
    names = [
        keys.request_key(rid),
        keys.log_key(rid),
        keys.channel_name(rid),
        keys.queue_key(7, "m", "batch"),
        keys.load_key(7, "m", "batch"),
        keys.control_channel(7),
        keys.dead_key(7),
        keys.idempotency_key(7, "d"),
        keys.ledger_key(7, "t", "20260101"),
        keys.wait_key(7, "m", "batch"),
        keys.turn_key(7, "m", "batch"),
        keys.share_key(7, "m", "batch", "t"),
        keys.served_key(7, "m", "batch"),
        keys.bell_key(7, "m", "batch"),
        keys.own_bell_key(7, "m", "w"),
        keys.spare_bell_key(7, "m", "interactive"),
        keys.seat_key(7, "m", "w"),
        keys.room_key(7, "m"),
        keys.limit_key(7, "t"),
        keys.open_key(7, "t"),
    ]
    assert {re.search(r"\{(.*?)\}", name).group(1) for name in names} == {"q07"}  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "text", ["", "07", "0" * 25, "0" * 27, "٠٧" + "a" * 24, "07" + "0x" + "a" * 22, "07" + "G" * 24]
)
def test_a_foreign_id_is_not_taken_for_a_request_id(text: str) -> None:
    assert not keys.is_rid(text)
    with pytest.raises(ValueError, match="not a request id"):
        keys.shard_of(text)


def test_a_new_id_names_its_shard() -> None:
    assert [keys.shard_of(keys.new_rid(shard)) for shard in (0, 7, 63)] == [0, 7, 63]


def test_load_and_predecessors_follow_from_a_queues_name() -> None:
    queue = keys.queue_key(3, "org/a:queue:b", "batch")
    assert keys.load_of_queue(queue) == keys.load_key(3, "org/a:queue:b", "batch")
    assert keys.queues_before(queue) == [keys.queue_key(3, "org/a:queue:b", "interactive")]
    assert keys.queues_before(keys.queue_key(3, "m", "interactive")) == []
