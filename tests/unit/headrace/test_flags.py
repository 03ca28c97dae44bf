"""Flags: one name in three spellings, the same limits as the programs' own settings, refusals that help."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import typer
from pydantic import BaseModel
from typer.testing import CliRunner

from api_service.settings import Settings
from engine_worker.settings import WorkerSettings
from headrace.flags import API, COMMON, SAMPLING, SERVE, WORKER, Flag, takes

EVERY = (*COMMON, *API, *WORKER, *SERVE)
NOT_FLAGS = {"model", "fault"}
"""`model` is an argument, `fault` a switch for tests."""


def run(*arguments: str, env: dict[str, str] | None = None) -> tuple[int, dict[str, str], str]:
    """Exit code, settings that the command got, and output."""
    seen: dict[str, str] = {}
    app = typer.Typer()

    @app.command()
    @takes(*EVERY, *SAMPLING)
    def command(settings: dict[str, str]) -> None:
        seen.update(settings)

    # A wide terminal, so that no message is wrapped.
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "400", "TERM": "dumb", **(env or {})})
    return result.exit_code, seen, result.output


def bounds(model: type[BaseModel], name: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for rule in model.model_fields[name].metadata:
        for word in ("ge", "gt", "le", "lt"):
            if getattr(rule, word, None) is not None:
                found[word] = getattr(rule, word)
    return found


@pytest.mark.parametrize(("flags", "settings"), [((*COMMON, *API), Settings), ((*COMMON, *WORKER), WorkerSettings)])
def test_every_setting_of_a_program_has_a_flag_and_the_other_way_round(
    flags: tuple[Flag, ...], settings: type[BaseModel]
) -> None:
    assert {flag.field for flag in flags} == set(settings.model_fields) - NOT_FLAGS


@pytest.mark.parametrize("flag", [flag for flag in EVERY if flag.low is not None], ids=lambda flag: flag.option)
def test_limits_are_the_programs_own(flag: Flag) -> None:
    for settings in (Settings, WorkerSettings):
        if flag.field not in settings.model_fields:
            continue
        own = bounds(settings, flag.field)
        assert flag.low >= own.get("ge", flag.low), f"{flag.option} lets pass what {settings.__name__} refuses"
        if "le" in own:
            assert flag.high is not None
            assert flag.high <= own["le"]


def test_a_flag_becomes_the_variable_that_the_program_reads() -> None:
    code, settings, _ = run("--max-num-seqs", "3", "--no-enable-prefix-caching", "--dtype", "float32", "--port", "0")
    assert code == 0
    assert settings == {
        "HEADRACE_MAX_NUM_SEQS": "3",
        "HEADRACE_ENABLE_PREFIX_CACHING": "false",
        "HEADRACE_DTYPE": "float32",
        "HEADRACE_PORT": "0",
    }


def test_what_was_not_set_is_not_passed_on() -> None:
    assert run(env={"HEADRACE_SERVED_MODEL_NAME": ""}) == (0, {}, "")


def test_repeated_and_comma_separated_keys_are_one_list() -> None:
    assert run("--api-key", "a", "--api-key", "b,c")[1] == {"HEADRACE_API_KEY": "a,b,c"}
    assert run(env={"HEADRACE_API_KEY": "a,b"})[1] == {"HEADRACE_API_KEY": "a,b"}


def test_redis_url_is_read_from_both_variables_and_a_flag_wins() -> None:
    env = {"REDIS_URL": "redis://one:1/0"}
    assert run(env=env)[1] == {"HEADRACE_REDIS_URL": "redis://one:1/0"}
    assert run("--redis-url", "redis://two:2/0", env=env)[1] == {"HEADRACE_REDIS_URL": "redis://two:2/0"}


@pytest.mark.parametrize(
    ("flag", "value", "allowed"),
    [
        ("--max-num-seqs", "0", "from 1 to 4096"),
        ("--max-num-seqs", "many", "a whole number from 1 to 4096"),
        ("--threads", "1.5", "a whole number from 0 to 1024"),
        ("--target-itl-ms", "nan", "a number from 0 to 60000"),
        ("--keepalive-s", "soon", "a number, 0.05 or more"),
        ("--workers", "0", "a whole number, 1 or more"),
        ("--temperature", "9", "a number from 0 to 2"),
        ("--lease-ms", "1", "from 200 to 3600000"),
        ("--max-body-bytes", "1", "1024 or more"),
        ("--port", "70000", "from 0 to 65535"),
        ("--dtype", "int4", "one of auto, float32, bfloat16, float16"),
        ("--quantization", "int3", "q8_0"),
        ("--kv-cache-memory", "lots", "with K, M or G"),
        ("--kv-cache-memory", "-1G", "with K, M or G"),
        ("--kv-cache-memory", "1", "64K or more"),
        ("--kv-cache-memory", "63K", "64K or more"),
        ("--api-key-file", "/no/such/file", "can be read (No such file"),
        ("--redis-url", "http://here", "redis://HOST:PORT/DB"),
        ("--served-model-name", "a b", "letters, digits"),
        ("--root-path", "llm/", "a path such as /llm"),
        ("--log-level", "loud", "warning"),
    ],
)
def test_a_bad_value_names_the_flag_and_what_is_allowed(flag: str, value: str, allowed: str) -> None:
    code, settings, output = run(f"{flag}={value}")
    assert code == 2
    assert settings == {}
    assert flag in output
    assert allowed in output


@pytest.mark.parametrize(
    ("variable", "value", "flag"),
    [
        ("HEADRACE_BLOCK_SIZE", "0", "--block-size"),
        ("HEADRACE_WORKERS", "two", "--workers"),
        ("HEADRACE_KV_CACHE_MEMORY", "1", "--kv-cache-memory"),
        ("REDIS_URL", "here", "--redis-url"),
        ("HEADRACE_REDIS_URL", "http://here", "--redis-url"),
    ],
)
def test_a_bad_value_in_a_variable_names_that_variable(variable: str, value: str, flag: str) -> None:
    code, _, output = run(env={variable: value})
    assert code == 2
    assert f"Invalid value for '{variable}' (the variable of {flag})" in output


def test_a_flag_is_blamed_for_its_own_value_though_the_variable_is_set() -> None:
    code, _, output = run("--redis-url", "here", env={"REDIS_URL": "redis://one:1/0"})
    assert code == 2
    assert "Invalid value for '--redis-url'" in output


def test_a_refused_url_is_shown_without_its_password() -> None:
    output = run("--redis-url", "http://me:secret@here")[2]
    assert "http://***@here" in output
    assert "secret" not in output


def test_the_smallest_cache_is_the_programs_own(tmp_path: Path) -> None:
    least = bounds(WorkerSettings, "kv_cache_memory")["ge"]
    assert run(f"--kv-cache-memory={least}")[0] == 0
    assert run(f"--kv-cache-memory={least - 1}")[0] == 2
    empty = tmp_path / "keys"
    empty.write_text("\n")
    assert "at least one key" in run("--api-key-file", str(empty))[2]


def test_help_shows_flag_variable_and_default_of_each() -> None:
    output = re.sub(r"\s+", " ", run("--help")[2])
    for flag in EVERY:
        assert flag.option in output
        assert flag.env in output
        assert f"[default: ({flag.default})]" in output or f"[default: {flag.default}]" in output
