"""`load` from end to end: both formats give the same model; incomplete or foreign checkpoints are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from engine_worker.errors import LoadError
from engine_worker.models import config
from engine_worker.models.config import resolve_dtype
from engine_worker.models.loading.loader import load
from tests.support.gguf_model import make_tiny_gguf
from tests.support.llama_oracle import default_gguf, greedy, hf_from_directory, hf_from_gguf
from tests.support.paged import PagedModel
from tests.support.tiny_model import make_tiny_llama, tiny_tokenizer

IDS = [5, 9, 200, 31, 31, 77, 2, 150, 8]


def logits(source: Path | str, dtype: str = "float32") -> torch.Tensor:
    return PagedModel(load(str(source), dtype=dtype, device="cpu").model).run([(0, IDS)])[0]


@pytest.mark.parametrize(
    "config",
    [{}, {"tie_word_embeddings": True}, {"num_key_value_heads": 4}, {"head_dim": 16}, {"attention_bias": True}],
    ids=["plain", "tied", "multi-head", "head_dim", "bias"],
)
def test_a_gguf_file_is_the_same_model_as_its_directory(tmp_path: Path, config: dict[str, Any]) -> None:
    make_tiny_llama(tmp_path / "hf", **config)
    head = {"llama.attention.key_length": config["head_dim"]} if "head_dim" in config else {}
    make_tiny_gguf(tmp_path / "m.gguf", metadata=head, **config)
    torch.testing.assert_close(logits(tmp_path / "m.gguf"), logits(tmp_path / "hf"), rtol=1e-6, atol=1e-6)


def test_a_qwen2_gguf_file_is_not_interleaved(tmp_path: Path) -> None:
    config: dict[str, Any] = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
    make_tiny_llama(tmp_path / "hf", **config)
    make_tiny_gguf(tmp_path / "m.gguf", architecture="qwen2", **config)
    torch.testing.assert_close(logits(tmp_path / "m.gguf"), logits(tmp_path / "hf"), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_quantised_files_equal_transformers_on_dequantised_weights(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "m.gguf"
    make_tiny_gguf(path, kind=gguf.GGMLQuantizationType[kind])
    with torch.inference_mode():
        expected = hf_from_gguf(path)(torch.tensor([IDS])).logits[0]
    torch.testing.assert_close(logits(path), expected, rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_stored_float_types(tmp_path: Path, dtype: torch.dtype) -> None:
    path = make_tiny_llama(tmp_path / "m", torch_dtype=str(dtype).removeprefix("torch."))
    with torch.inference_mode():
        expected = hf_from_directory(path)(torch.tensor([IDS])).logits[0]
    torch.testing.assert_close(logits(path), expected, rtol=1e-4, atol=2e-4)


def test_everything_that_comes_along(tmp_path: Path) -> None:
    path = make_tiny_llama(tmp_path / "tiny")
    seen: list[tuple[int, int, str]] = []
    loaded = load(str(path), dtype="auto", device="cpu", progress=lambda *values: seen.append(values))
    assert loaded.name == "tiny"
    assert loaded.config is loaded.model.config
    assert loaded.config.dtype == "float32"
    assert loaded.eos_token_ids == (2,)
    assert loaded.tokenizer_json == tiny_tokenizer().to_str().encode()
    size = sum(tensor.nbytes for tensor in load_file(path / "model.safetensors").values())
    assert [done for done, _, _ in seen] == sorted(done for done, _, _ in seen)
    assert seen[0][0] == 0
    assert seen[-1][:2] == (size, size)
    assert {total for _, total, _ in seen} == {size}


def test_shards_and_index(tmp_path: Path) -> None:
    path = make_tiny_llama(tmp_path / "m")
    expected = logits(path)
    shard(path, 3)
    torch.testing.assert_close(logits(path), expected, rtol=0, atol=0)
    (path / "part-1.safetensors").unlink()
    with pytest.raises(LoadError, match=r"part-1\.safetensors is missing, although the index names it"):
        load(str(path))


def test_the_fingerprint_is_the_weights_not_the_place(tmp_path: Path) -> None:
    def fingerprint(name: str, dtype: str = "float32", **arguments: Any) -> str:
        return load(str(make_tiny_llama(tmp_path / name, **arguments)), dtype=dtype, device="cpu").fingerprint

    one = fingerprint("a")
    assert len(one) == 16
    assert fingerprint("b") == one
    assert fingerprint("c", seed=1) != one
    assert fingerprint("d", dtype="bfloat16") != one
    shard(tmp_path / "a", 2)
    assert load(str(tmp_path / "a"), dtype="float32", device="cpu").fingerprint == one


def edit(path: Path, change: Any) -> None:
    weights = load_file(path / "model.safetensors")
    change(weights)
    save_file(weights, path / "model.safetensors")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.pop("model.layers.1.mlp.up_proj.weight"), "lacks tensors .* model.layers.1.mlp.up_proj.weight"),
        (lambda w: w.pop("model.norm.weight"), r"lacks tensors .* model\.norm\.weight"),
        (
            lambda w: w.update({"model.layers.0.self_attn.q_norm.weight": torch.ones(8)}),
            r"this architecture does not have: model\.layers\.0\.self_attn\.q_norm\.weight",
        ),
        (lambda w: w.update({"model.norm.weight": torch.ones(31)}), r"'model\.norm\.weight' has shape \(31,\)"),
        (
            lambda w: w.update({"lm_head.weight": torch.ones(320, 32, dtype=torch.int8)}),
            "'lm_head.weight' is stored as I8. Only plain float checkpoints",
        ),
    ],
    ids=["matrix missing", "norm missing", "foreign tensor", "wrong shape", "wrong dtype"],
)
def test_ld_04_checkpoints_that_do_not_fit_are_refused(tmp_path: Path, change: Any, message: str) -> None:
    path = make_tiny_llama(tmp_path / "m")
    edit(path, change)
    with pytest.raises(LoadError, match=message):
        load(str(path), device="cpu")


def test_derived_and_tied_tensors_may_be_stored_too(tmp_path: Path) -> None:
    path = make_tiny_llama(tmp_path / "m", tie_word_embeddings=True)
    expected = logits(path)
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4), "lm_head.weight": torch.ones(320, 32)}
    edit(path, lambda weights: weights.update(extra))
    torch.testing.assert_close(logits(path), expected, rtol=0, atol=0)


def test_damaged_or_absent_weights(tmp_path: Path) -> None:
    path = make_tiny_llama(tmp_path / "m")
    data = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(data[: len(data) // 2])
    with pytest.raises(LoadError, match="damaged or incomplete"):
        load(str(path), device="cpu")
    (path / "model.safetensors").unlink()
    with pytest.raises(LoadError, match=r"holds no model\.safetensors"):
        load(str(path), device="cpu")


def test_unknown_devices_are_refused(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=r"'tpu' is unknown\. Allowed: auto, cpu, cuda"):
        load(str(tmp_path), device="tpu")
    if not torch.cuda.is_available():
        with pytest.raises(LoadError, match="--device cuda: torch finds no CUDA device"):
            load(str(tmp_path), device="cuda")


@pytest.mark.real_model
def test_the_default_model_equals_transformers() -> None:
    """Logits in a mixed batch, greedy continuations of short and 700-token prompts, and bfloat16 near float32."""
    hf = hf_from_gguf(default_gguf())
    model = load("", dtype="float32", device="cpu").model
    paged = PagedModel(model)
    rng = np.random.default_rng(0)
    long, short = (rng.integers(17, 49152, count).tolist() for count in (700, 3))
    with torch.inference_mode():
        expected = hf(torch.tensor([long])).logits[0]
    first, one = paged.run([(0, long[:200]), (1, short[:1])])
    two, second = paged.run([(1, short[1:2]), (0, long[200:699])])
    last, three = paged.run([(0, long[699:]), (1, short[2:])])
    out = torch.cat([first, second, last])
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-3)
    for number, (prompt, row) in enumerate([(long, last), (short, three)]):
        tokens = [int(row[-1].argmax())]
        while len(tokens) < 12:
            tokens.append(int(paged.run([(number, tokens[-1:])])[0][-1].argmax()))
        assert tokens == greedy(hf, prompt, 12)
    del one, two
    narrow = PagedModel(load("", dtype="bfloat16", device="cpu").model).run([(0, long)])[0]
    assert float((narrow - expected).norm() / expected.norm()) < 2e-2


def shard(path: Path, count: int) -> None:
    weights = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    names = sorted(weights)
    index = {name: f"part-{number % count}.safetensors" for number, name in enumerate(names)}
    for file in set(index.values()):
        save_file({name: weights[name] for name in names if index[name] == file}, path / file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


@pytest.mark.real_model
def test_a_small_model_is_exact_on_a_cpu_unless_asked_otherwise() -> None:
    exact, fast = (load("", dtype=dtype, device="cpu") for dtype in ("auto", "bfloat16"))
    assert (exact.config.dtype, fast.config.dtype) == ("float32", "bfloat16")
    assert 134e6 < exact.config.num_parameters() < 135e6


def test_a_large_model_keeps_its_own_type(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_tiny_llama(tmp_path / "tiny", torch_dtype="bfloat16")
    assert load(str(path), device="cpu").config.dtype == "float32"
    monkeypatch.setattr(config, "_EXACT_UP_TO", 1)
    declared = load(str(path), device="cpu").config.dtype
    assert declared == resolve_dtype("auto", "bfloat16", torch.device("cpu"))


def test_the_cache_type_decides_pages_and_their_bytes(tmp_path: Path) -> None:
    path = str(make_tiny_llama(tmp_path / "m"))
    own, small = (load(path, dtype="float32", device="cpu", kv_cache_dtype=name) for name in ("auto", "int8"))
    for loaded, storage in ((own, torch.float32), (small, torch.int8)):
        cache = loaded.model.new_kv_cache(3, 16)
        assert (cache.storage, cache.dtype) == (storage, torch.float32)
        assert cache.num_bytes == 3 * 16 * loaded.config.kv_bytes_per_token()
    head = own.config.head_dim
    assert small.config.kv_bytes_per_token() * 4 * head == own.config.kv_bytes_per_token() * (head + 4)
    with pytest.raises(LoadError, match=r"kv_cache_dtype 'fp8' is unknown\. Allowed: auto, float32, bfloat16, int8"):
        load(path, device="cpu", kv_cache_dtype="fp8")


def test_batch_invariance_is_refused_where_it_cannot_be_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_CPU_BACKEND", "torch")
    with pytest.raises(LoadError, match=r"batch_invariant needs the native CPU kernels.*HEADRACE_CPU_BACKEND is torch"):
        load(str(make_tiny_llama(tmp_path / "m")), device="cpu", batch_invariant=True)
