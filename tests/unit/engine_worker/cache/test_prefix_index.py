"""Prefixes: what may be equal, what must differ, and that a colliding hash is only ever a miss."""

from __future__ import annotations

import pytest

from engine_worker.cache import prefix_index
from engine_worker.cache.prefix_index import Prefix, PrefixIndex, extend, root


def chain(*blocks: list[int], start: Prefix | None = None) -> list[Prefix]:
    prefixes, parent = [], start or root()
    for block in blocks:
        parent = extend(parent, block)
        prefixes.append(parent)
    return prefixes


def test_an_equal_prefix_built_anew_is_found() -> None:
    index = PrefixIndex()
    for block, prefix in enumerate(chain([1, 2], [3, 4])):
        assert index.insert(prefix, block)
    found = index.find(chain([1, 2], [3, 4])[1])
    assert found is not None
    assert found[1] == 1


def test_the_same_block_after_another_prefix_is_not_found() -> None:
    index = PrefixIndex()
    index.insert(chain([1, 2], [3, 4])[1], 0)
    assert index.find(chain([9, 2], [3, 4])[1]) is None
    assert index.find(chain([3, 4])[0]) is None


@pytest.mark.parametrize("difference", [256, 65_536, 2**24, 2**32])
def test_kv_02_ids_are_hashed_at_full_width(difference: int) -> None:
    one, other = chain([65, 7])[0], chain([65 + difference, 7])[0]
    assert one.digest != other.digest
    index = PrefixIndex()
    index.insert(one, 0)
    assert index.find(other) is None


def test_kv_03_kinds_of_extra_keys_do_not_collide() -> None:
    roots = [
        root(("salt", "x")),
        root(("adapter", "x")),
        root(("salt", "x"), ("adapter", "")),
        root(("salt", ""), ("adapter", "x")),
        root(("sal", "tx")),
        root(),
    ]
    firsts = [extend(start, [1, 2]) for start in roots]
    assert len({prefix.digest for prefix in firsts}) == len(firsts)
    assert not any(a.same_as(b) for i, a in enumerate(firsts) for b in firsts[:i])


def test_a_hash_that_collides_is_a_miss_and_never_wrong_content(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_index, "_digest", lambda data: b"same")
    index = PrefixIndex()
    ours, theirs = chain([1, 2], [5, 6]), chain([3, 4], [5, 6])
    assert index.insert(ours[0], 0)
    assert not index.insert(theirs[0], 1)
    assert index.find(theirs[0]) is None
    # The ancestor that told them apart is evicted; its child still knows what came before.
    index.forget(0)
    index.insert(ours[1], 2)
    assert index.find(theirs[1]) is None
    found = index.find(chain([1, 2], [5, 6])[1])
    assert found is not None
    assert found[1] == 2


def test_a_forgotten_block_is_gone_in_both_directions() -> None:
    index = PrefixIndex()
    (prefix,) = chain([1, 2])
    index.insert(prefix, 7)
    index.forget(7)
    index.forget(7)
    assert index.find(prefix) is None
    assert len(index) == 0
    assert index.insert(prefix, 8)
    index.check_integrity()


def test_a_block_stands_for_one_prefix_only() -> None:
    index = PrefixIndex()
    first, second = chain([1, 2])[0], chain([3, 4])[0]
    assert index.insert(first, 0)
    assert not index.insert(second, 0)
    assert not index.insert(chain([1, 2])[0], 1)
    index.check_integrity()


def test_a_prefix_under_an_equal_parent_stays_the_same_prefix() -> None:
    ours, theirs = chain([1, 2], [3, 4]), chain([1, 2], [3, 4])
    moved = ours[1].under(theirs[0])
    assert moved.parent is theirs[0]
    assert moved.digest == ours[1].digest
    assert moved.same_as(ours[1])
    assert moved.under(theirs[0]) is moved
