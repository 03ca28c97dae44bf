"""Worker settings: from the environment, refused by name."""

from __future__ import annotations

import os

import pytest

from engine_worker.settings import SettingsError, read_settings


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("HEADRACE_") or name == "REDIS_URL"]:
        monkeypatch.delenv(name)


def test_defaults() -> None:
    settings = read_settings()
    assert (settings.max_num_seqs, settings.max_num_batched_tokens, settings.block_size) == (64, 576, 16)
    assert settings.kv_cache_memory == 1 << 30
    assert str(os.getpid()) in settings.worker_id


def test_two_processes_never_share_a_worker_id() -> None:
    assert read_settings().worker_id != read_settings().worker_id


def test_redis_url_is_read_under_both_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDIS_URL", "redis://plain:1/0")
    assert read_settings().redis_url == "redis://plain:1/0"
    monkeypatch.setenv("HEADRACE_REDIS_URL", "redis://ours:1/0")
    assert read_settings().redis_url == "redis://ours:1/0"


@pytest.mark.parametrize(
    ("text", "size"), [("1G", 1 << 30), ("512m", 512 << 20), ("1.5G", 3 << 29), ("65536", 65536), ("2 GiB", 2 << 30)]
)
def test_sizes_take_suffixes(monkeypatch: pytest.MonkeyPatch, text: str, size: int) -> None:
    monkeypatch.setenv("HEADRACE_KV_CACHE_MEMORY", text)
    assert read_settings().kv_cache_memory == size


@pytest.mark.parametrize(
    ("variable", "value", "allowed"),
    [
        ("HEADRACE_MAX_NUM_SEQS", "0", "greater than or equal to 1"),
        ("HEADRACE_MAX_NUM_SEQS", "many", "valid integer"),
        ("HEADRACE_DTYPE", "int3", "'auto', 'float32', 'bfloat16' or 'float16'"),
        ("HEADRACE_QUANTIZATION", "int3", "'auto', 'none', 'gguf', 'int8', 'q8_0', 'q4_0' or 'q4_1'"),
        ("HEADRACE_DEVICE", "tpu", "'auto', 'cpu' or 'cuda'"),
        ("HEADRACE_KV_CACHE_MEMORY", "lots", "valid integer"),
        ("HEADRACE_TARGET_ITL_MS", "-1", "greater than or equal to 0"),
        ("HEADRACE_LEASE_MS", "1", "greater than or equal to 200"),
        ("HEADRACE_ENABLE_PREFIX_CACHING", "perhaps", "valid boolean"),
    ],
)
def test_a_bad_value_is_refused_by_name_with_what_is_allowed(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, allowed: str
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(SettingsError) as caught:
        read_settings()
    (line,) = str(caught.value).splitlines()
    assert line.startswith(f"{variable}={value!r}: ")
    assert allowed in line


def test_every_bad_value_has_its_line_and_a_url_is_never_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDIS_URL", "http://user:secret@host")
    monkeypatch.setenv("HEADRACE_SHARDS", "-1")
    with pytest.raises(SettingsError) as caught:
        read_settings()
    message = str(caught.value)
    assert len(message.splitlines()) == 2
    assert "must begin with redis://" in message
    assert "secret" not in message
