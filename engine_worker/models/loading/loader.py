"""`load`: from what the user named to a model ready to serve: files, configuration, text assets, weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from engine_worker.errors import LoadError
from engine_worker.layers.weights import WeightStore
from engine_worker.models.base import LoadedModel
from engine_worker.models.config import CACHE_DTYPES, ModelConfig, prefer_exact
from engine_worker.models.loading.checkpoint import Checkpoint, Progress, fill, fingerprint
from engine_worker.models.loading.config_gguf import config_from_gguf, has_interleaved_heads
from engine_worker.models.loading.config_hf import config_from_hf
from engine_worker.models.loading.gguf_file import GgufFile
from engine_worker.models.loading.gguf_text import text_from_gguf
from engine_worker.models.loading.gguf_weights import GgufCheckpoint
from engine_worker.models.loading.hf_text import read_json, text_from_hf
from engine_worker.models.loading.safetensors_weights import SafetensorsCheckpoint
from engine_worker.models.loading.sources import resolve
from engine_worker.models.loading.text_assets import TextAssets
from engine_worker.models.registry import model_class
from engine_worker.quant.scheme import make_scheme
from kernels.ops import select_backend, will_compile

__all__ = ["COMPILING", "load"]

COMPILING = "compiling kernels for this CPU (once)"
"""What `progress` is called with, and no bytes, before the one start that takes some seconds longer."""


@dataclass(frozen=True, slots=True)
class _Opened:
    config: ModelConfig
    text: TextAssets
    checkpoint: Checkpoint


def load(
    source: str = "",
    *,
    dtype: str = "auto",
    device: str = "auto",
    max_model_len: int | None = None,
    quantization: str = "auto",
    kv_cache_dtype: str = "auto",
    batch_invariant: bool = False,
    progress: Progress | None = None,
) -> LoadedModel:
    """Loads the model `source` names: a directory, a hub id, a .gguf file, or "" for the default model.

    `device` is auto, cpu or cuda; auto takes CUDA where there is some. `quantization` is one of QUANTIZATIONS,
    `kv_cache_dtype` auto or one of CACHE_DTYPES. `batch_invariant`: see `select_backend`.
    `progress(done_bytes, total_bytes, what)` is called before every tensor and once at the end, and with COMPILING
    before kernels are compiled, from this thread.
    Raises LoadError with a message for the user.
    """
    target = _device(device)
    resolved = resolve(source)
    opener = _open_gguf if resolved.is_gguf else _open_directory
    opened = opener(resolved.path, dtype, target, max_model_len)
    # Who asks for quantised weights has chosen speed: float32 would compute exactly what is no longer exact.
    exact = quantization in ("auto", "none")
    config = prefer_exact(opened.config, dtype, target) if exact else opened.config
    config = replace(config, kv_cache_dtype=_cache_dtype(kv_cache_dtype))
    report = progress or _silent
    try:
        if will_compile(target):
            report(0, 0, COMPILING)
        ops = select_backend(target, batch_invariant=batch_invariant)
    except ValueError as error:
        raise LoadError(str(error)) from error
    architecture = model_class(config.architecture)
    kinds = {name: info.kind for name, info in opened.checkpoint.tensors.items()}
    scheme = make_scheme(quantization, config.torch_dtype, kinds, ops.weight_formats, ops.note)
    store = WeightStore(architecture.specs(config), ops, config.torch_dtype, target, scheme=scheme)
    fill(store, opened.checkpoint, report, tied=config.tie_word_embeddings)
    formats = store.formats()
    return LoadedModel(
        model=architecture(config, store, ops, target),
        ops=ops,
        config=config,
        tokenizer_json=opened.text.tokenizer_json,
        chat_template=opened.text.chat_template,
        special_tokens=opened.text.special_tokens,
        add_bos=opened.text.add_bos,
        eos_token_ids=opened.text.eos_token_ids,
        defaults=opened.text.defaults,
        name=resolved.name,
        kernels=ops.name,
        quantization=", ".join(formats) or (f"none ({scheme.note})" if scheme.note else "none"),
        weight_bytes=store.num_bytes,
        fingerprint=fingerprint(opened.checkpoint, config.architecture, config.dtype, *formats),
    )


_Opener = Callable[[Path, str, torch.device, int | None], _Opened]


def _open_gguf(path: Path, dtype: str, device: torch.device, max_model_len: int | None) -> _Opened:
    file = GgufFile(path)
    config = config_from_gguf(file, dtype=dtype, device=device, max_model_len=max_model_len)
    checkpoint = GgufCheckpoint(
        file,
        interleaved=has_interleaved_heads(config),
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
    )
    return _Opened(config, text_from_gguf(file), checkpoint)


def _open_directory(path: Path, dtype: str, device: torch.device, max_model_len: int | None) -> _Opened:
    raw = read_json(path / "config.json")
    config = config_from_hf(raw, dtype=dtype, device=device, max_model_len=max_model_len)
    return _Opened(config, text_from_hf(path, raw), SafetensorsCheckpoint(path))


def _device(name: str) -> torch.device:
    if name not in {"auto", "cpu", "cuda"}:
        raise LoadError(f"The device {name!r} is unknown. Allowed: auto, cpu, cuda.")
    if name == "cuda" and not torch.cuda.is_available():
        raise LoadError("--device cuda: torch finds no CUDA device here. Leave --device away, or take cpu.")
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(name)


def _cache_dtype(name: str) -> str:
    if name != "auto" and name not in CACHE_DTYPES:
        raise LoadError(f"The kv_cache_dtype {name!r} is unknown. Allowed: auto, {', '.join(CACHE_DTYPES)}.")
    return name


def _silent(_done: int, _total: int, _what: str) -> None:
    """No progress wanted."""
