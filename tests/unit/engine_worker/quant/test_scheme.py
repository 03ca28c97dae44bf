"""Which matrix is kept how, as a table of cases."""

from __future__ import annotations

import pytest
import torch

from engine_worker.errors import LoadError
from engine_worker.quant.scheme import QUANTIZATIONS, Storage, make_scheme

FORMATS = frozenset({"int8", "q8_0", "q4_0", "q4_1"})
F32, BF16 = torch.float32, torch.bfloat16


def storage(
    requested: str, kinds: list[str], *, dtype: torch.dtype = BF16, precise: bool = False, rest: str = "Q4_0"
) -> Storage:
    names = {f"part{index}": kind for index, kind in enumerate(kinds)}
    scheme = make_scheme(requested, dtype, names | {"another": rest}, FORMATS)
    return scheme.storage(list(names), precise=precise)


@pytest.mark.parametrize(
    ("kinds", "wanted"),
    [
        (["Q4_1"], Storage("q4_1", blocks=True)),
        (["Q8_0", "Q8_0", "Q8_0"], Storage("q8_0", blocks=True)),
        (["Q4_K", "Q4_K"], Storage("q4_1", blocks=True)),
        (["Q4_K", "Q4_1"], Storage("q4_1", blocks=True)),
        (["Q4_0", "Q4_1"], Storage("q4_1", blocks=True)),
        (["Q4_1", "Q8_0"], Storage("q8_0", staging=F32)),
        (["Q4_K", "Q4_K", "Q6_K"], Storage("q8_0", staging=F32)),
        (["Q4_0", "Q8_0"], Storage("q8_0", blocks=True)),
        (["Q6_K"], Storage("q8_0", staging=F32)),
        (["Q5_1", "Q5_1"], Storage("q8_0", staging=F32)),
        (["Q2_K"], Storage("q8_0", staging=F32)),
        (["F16"], Storage()),
        (["Q4_0", "F32"], Storage()),
    ],
)
def test_as_the_file_holds_them(kinds: list[str], wanted: Storage) -> None:
    assert storage("gguf", kinds) == wanted
    assert storage("auto", kinds) == wanted
    assert storage("none", kinds) == Storage()


def test_auto_keeps_float32_exact() -> None:
    assert storage("auto", ["Q4_1"], dtype=F32) == Storage()
    assert storage("gguf", ["Q4_1"], dtype=F32) == Storage("q4_1", blocks=True)


@pytest.mark.parametrize(
    ("requested", "kinds", "precise", "wanted"),
    [
        ("int8", ["BF16", "BF16"], False, Storage("int8", staging=BF16)),
        ("int8", ["BF16", "F32"], False, Storage("int8", staging=F32)),
        ("int8", ["Q8_0"], True, Storage("int8", staging=F32)),
        ("q8_0", ["Q8_0", "Q8_0"], False, Storage("q8_0", blocks=True)),
        ("q8_0", ["Q4_1"], False, Storage("q8_0", staging=F32)),
        ("q4_0", ["F16"], False, Storage("q4_0", staging=F32)),
        ("q4_1", ["F16"], True, Storage("q8_0", staging=F32)),
        ("q4_1", ["Q8_0"], True, Storage("q8_0", blocks=True)),
        ("q4_1", ["Q4_K"], False, Storage("q4_1", blocks=True)),
    ],
)
def test_quantized_at_load(requested: str, kinds: list[str], precise: bool, wanted: Storage) -> None:
    assert storage(requested, kinds, precise=precise) == wanted


@pytest.mark.parametrize(("dtype", "formats"), [(BF16, frozenset[str]()), (torch.float16, FORMATS)])
def test_auto_is_in_full_where_kernels_have_none(dtype: torch.dtype, formats: frozenset[str]) -> None:
    scheme = make_scheme("auto", dtype, {"w": "Q4_0"}, formats)
    assert scheme.storage(["w"], precise=False) == Storage()
    # auto promises packed blocks to nobody but bfloat16.
    assert bool(scheme.note) == (dtype is BF16)


@pytest.mark.parametrize("requested", ["gguf", "int8", "q8_0", "q4_0", "q4_1"])
def test_what_kernels_cannot_do_is_refused_where_it_was_asked_for_by_name(requested: str) -> None:
    kinds = {"w": "Q4_0"}
    with pytest.raises(LoadError, match=rf"--quantization {requested} and --dtype float16 exclude each other"):
        make_scheme(requested, torch.float16, kinds, FORMATS)
    with pytest.raises(LoadError, match=rf"--quantization {requested} needs .*: no compiler\. .*--quantization none"):
        make_scheme(requested, BF16, kinds, frozenset(), "no compiler")
    with pytest.raises(LoadError, match="HEADRACE_CPU_BACKEND is torch, or the device is not a CPU"):
        make_scheme(requested, BF16, kinds, frozenset())


def test_bad_requests_are_refused() -> None:
    with pytest.raises(LoadError, match=r"'int3' is unknown.*auto, none, gguf"):
        make_scheme("int3", BF16, {}, FORMATS)
    with pytest.raises(LoadError, match="no quantised weights"):
        make_scheme("gguf", BF16, {"w": "BF16"}, FORMATS)
    assert make_scheme("auto", BF16, {"w": "BF16"}, FORMATS).note == ""
    assert "auto" in QUANTIZATIONS
