"""Settings come from the environment and are refused by name."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from api_service.settings import Settings, describe_errors


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("REDIS_URL", raising=False)


def test_defaults_are_a_local_pod() -> None:
    settings = Settings()
    assert (settings.host, settings.port, settings.keys()) == ("127.0.0.1", 8000, ())


def test_variables_of_both_names_give_the_redis_url(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDIS_URL", "redis://a:1/0")
    assert Settings().redis_url == "redis://a:1/0"
    monkeypatch.setenv("HEADRACE_REDIS_URL", "unix:///tmp/b.sock")
    assert Settings().redis_url == "unix:///tmp/b.sock"


def test_keys_from_variable_and_file_are_joined(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("three\n\nfour\n")
    monkeypatch.setenv("HEADRACE_API_KEY", "first, two")
    monkeypatch.setenv("HEADRACE_API_KEY_FILE", str(tmp_path / "keys"))
    settings = Settings()
    assert settings.keys() == ("first", "two", "three", "four")
    assert "first" not in repr(settings)


@pytest.mark.parametrize(
    ("variable", "value", "says"),
    [
        ("HEADRACE_PORT", "99999", "HEADRACE_PORT='99999' is not allowed: less than or equal to 65535"),
        ("HEADRACE_LOG_LEVEL", "loud", "'debug', 'info', 'warning' or 'error'"),
        ("HEADRACE_REDIS_URL", "http://x", "HEADRACE_REDIS_URL='http://x' is not allowed: must be redis://"),
        ("HEADRACE_ROOT_PATH", "llm/", "HEADRACE_ROOT_PATH='llm/' is not allowed: must begin with /"),
        ("HEADRACE_API_KEY_FILE", "/nowhere", "HEADRACE_API_KEY_FILE is not allowed: api_key_file cannot be read"),
        ("HEADRACE_KEEPALIVE_S", "soon", "HEADRACE_KEEPALIVE_S='soon' is not allowed"),
    ],
)
def test_a_bad_value_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, variable: str, value: str, says: str) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(ValidationError) as error:
        Settings()
    assert says in describe_errors(error.value)


def test_the_program_ends_with_code_2(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_PORT", "x")
    done = subprocess.run(
        [sys.executable, "-m", "api_service"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    assert "HEADRACE_PORT='x' is not allowed" in done.stderr
    assert "Traceback" not in done.stderr
