"""Placement and coverage of weights: every checkpoint tensor lands where its name says, once, and none is left out."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from engine_worker.errors import LoadError
from engine_worker.layers.decoder import DecoderShape
from engine_worker.layers.specs import LinearSpec, TensorSpec
from engine_worker.layers.weights import WeightStore
from kernels.reference import ReferenceOps

SPECS: list[TensorSpec | LinearSpec] = [
    TensorSpec("norm.weight", (6,)),
    LinearSpec("fused", (("a", 4), ("b", 2), ("c", 1)), in_features=3, bias=True),
    LinearSpec("plain", (("d", 5),), in_features=3),
]
NAMES = ["norm.weight", *(f"{part}.{kind}" for kind in ("weight", "bias") for part in "abc"), "d.weight"]


def store(specs: list[TensorSpec | LinearSpec] = SPECS) -> WeightStore:
    return WeightStore(specs, ReferenceOps(), torch.float32, torch.device("cpu"), poison=True)


def write(target: WeightStore, name: str, value: float) -> None:
    target.destination(name).fill_(value)
    target.written(name)


@pytest.mark.parametrize("ratio", [1, 4, 7])
def test_ld_02_fused_qkv_keeps_unequal_heads_apart(ratio: int) -> None:
    """Each row of the checkpoint holds its own number; the fused rows must be Q, K, V in that order, whole."""
    kv_heads, dim, hidden = 2, 4, 6
    shape = DecoderShape(
        hidden, 8, kv_heads * ratio, kv_heads, dim, 1e-5, qkv_bias=True, output_bias=False, mlp_bias=False
    )
    target = store(shape.specs("l."))
    sizes = {"q": kv_heads * ratio * dim, "k": kv_heads * dim, "v": kv_heads * dim}
    for offset, part in zip((1000, 2000, 3000), ("v", "q", "k"), strict=True):
        rows = torch.arange(sizes[part], dtype=torch.float32) + offset
        target.destination(f"l.self_attn.{part}_proj.weight").copy_(rows.unsqueeze(1).expand(-1, hidden))
        target.written(f"l.self_attn.{part}_proj.weight")
        target.destination(f"l.self_attn.{part}_proj.bias").copy_(rows)
        target.written(f"l.self_attn.{part}_proj.bias")
    packed = target.linear("l.qkv")
    expected = [offset + row for offset, part in ((2000, "q"), (3000, "k"), (1000, "v")) for row in range(sizes[part])]
    assert packed.weight[:, 0].tolist() == expected
    assert torch.equal(packed.weight, packed.weight[:, :1].expand(-1, hidden))
    assert packed.bias is not None
    assert packed.bias.tolist() == expected


@pytest.mark.parametrize("seed", range(5))
def test_ld_04_no_element_stays_unwritten_whatever_the_order(seed: int) -> None:
    target = store()
    order = NAMES.copy()
    random.Random(seed).shuffle(order)
    values = {name: float(number) for number, name in enumerate(NAMES)}
    for name in order:
        write(target, name, values[name])
    assert target.missing() == []
    fused, plain = target.linear("fused"), target.linear("plain")
    assert fused.weight.tolist() == [[values[f"{part}.weight"]] * 3 for part in "aaaabbc"]
    assert fused.bias is not None
    assert fused.bias.tolist() == [values[f"{part}.bias"] for part in "aaaabbc"]
    for tensor in (fused.weight, fused.bias, plain.weight, target.tensor("norm.weight")):
        assert torch.isfinite(tensor).all()


@pytest.mark.parametrize("absent", NAMES)
def test_ld_04_a_missing_part_is_reported_and_never_used(absent: str) -> None:
    target = store()
    for name in NAMES:
        if name != absent:
            write(target, name, 1.0)
    assert target.missing() == [absent]
    owner = "plain" if absent == "d.weight" else "fused"
    with pytest.raises(LoadError, match=absent):
        target.tensor(absent) if absent == "norm.weight" else target.linear(owner)


def test_ld_06_a_part_written_twice_is_refused() -> None:
    target = store()
    write(target, "a.weight", 1.0)
    with pytest.raises(LoadError, match=r"'a\.weight' twice"):
        target.destination("a.weight")


def test_knows_its_names_and_shapes() -> None:
    target = store()
    assert all(name in target for name in NAMES)
    assert "d.bias" not in target
    assert [target.shape(name) for name in ("norm.weight", "a.weight", "c.bias")] == [(6,), (4, 3), (1,)]


def test_parts_tile_their_buffer_exactly() -> None:
    """Coverage map: writing each part alone touches disjoint elements, and together all of them."""
    seen: list[torch.Tensor] = []
    for name in ("a.weight", "b.weight", "c.weight"):
        target = store()
        other = "b.weight" if name == "a.weight" else "a.weight"
        target.destination(name).fill_(1.0)
        base = target.destination(other)._base
        assert base is not None
        seen.append(~base.isnan())
    assert torch.stack(seen).sum(0).eq(1).all()
    assert not any((one & two).any() for one, two in itertools.combinations(seen, 2))
