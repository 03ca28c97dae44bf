"""The command line: maps flags to the programs' environment variables, and starts them.

In: argv and environment. Out: a running program, a chat, a table. Flags are declared in flags.py; the programs
themselves are `python -m api_service` and `python -m engine_worker`, which this package never imports.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from headrace import __version__, serve
from headrace.children import program
from headrace.embedded import find_running
from headrace.flags import API, COMMON, REDIS_URL, SAMPLING, SERVE, WORKER, takes
from headrace.later import later

if TYPE_CHECKING:
    from redis.asyncio import Redis

    from headrace import chat, dead, preflight, status
    from shared import connections, limits
else:
    chat, dead, status = later("headrace.chat"), later("headrace.dead"), later("headrace.status")
    preflight = later("headrace.preflight")
    connections, limits = later("shared.connections"), later("shared.limits")

__all__ = ["app", "main"]

app = typer.Typer(
    name="headrace",
    help="LLM inference as a queueing microservice: stateless API pods, engine workers, Redis between them.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
dead_app = typer.Typer(no_args_is_help=True, help="Requests that were put aside because they ended their workers.")
app.add_typer(dead_app, name="dead")

Model = Annotated[
    str,
    typer.Argument(
        envvar="HEADRACE_MODEL",
        show_default="SmolLM2-135M-Instruct",
        help="Hugging Face directory, hub id, or .gguf file.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Rid = Annotated[str, typer.Argument(help="Request id, as `headrace dead list` shows it.")]
Rids = Annotated[list[str], typer.Argument(help="Request ids, as `headrace dead list` shows them.")]


def _fail(message: str, code: int = 1) -> NoReturn:
    typer.echo(f"headrace: {message}", err=True)
    raise typer.Exit(code)


def _run_program(module: str, extra: str, needs: str, settings: dict[str, str]) -> NoReturn:
    """Becomes the program: same process id, so that signals and exit codes are its own."""
    if "HEADRACE_REDIS_URL" not in settings:
        _fail("which Redis? Set --redis-url or REDIS_URL (only `headrace serve` starts one of its own).", 2)
    if importlib.util.find_spec(needs) is None:
        _fail(f"{needs} is not installed. Install it with: pip install 'headrace[{extra}]'")
    command = program(module)
    os.execve(command[0], command, {**os.environ, **settings})


def _look_into(settings: dict[str, str], action: Callable[[Redis], Awaitable[int]]) -> int:
    """Runs `action` on the Redis that was named, else on the one that `headrace serve` started here."""
    url = settings.get("HEADRACE_REDIS_URL") or _only_running()

    async def connected() -> int:
        redis = connections.command_client(url)
        try:
            return await action(redis)
        finally:
            await redis.aclose()

    try:
        return asyncio.run(connected())
    except connections.REDIS_DOWN as error:
        _fail(f"Redis at {serve.without_password(url)} cannot be reached: {error}")


def _only_running() -> str:
    found = find_running()
    if not found:
        _fail("no `headrace serve` with a Redis of its own runs here. Name a Redis with --redis-url or REDIS_URL", 2)
    if len(found) > 1:
        each = "".join(f"\n  --redis-url {url}" for url in found)
        _fail(f"{len(found)} servers run here, and each said at its start which is its Redis. Add one of:{each}", 2)
    return found[0]


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"headrace {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


@app.command("serve")
@takes(*COMMON, *API, *WORKER, *SERVE)
def serve_command(settings: dict[str, str], model: Model = "") -> None:
    """Serve a model: Redis (embedded unless you name one), workers and the API, until Ctrl-C."""
    for needs, extra in (_worker_needs(settings), ("fastapi", "api")):
        if importlib.util.find_spec(needs) is None:
            _fail(f"{needs} is not installed. Install it with: pip install 'headrace[{extra}]'")
    _check_worker(model, settings)
    workers, data_dir = int(settings.pop("HEADRACE_WORKERS", "1")), settings.pop("HEADRACE_DATA_DIR", None)
    if data_dir is not None and "HEADRACE_REDIS_URL" in settings:
        _fail("--data-dir is for the embedded Redis, but --redis-url or REDIS_URL names another. Leave one away", 2)
    raise typer.Exit(serve.run(serve.Plan({**settings, "HEADRACE_MODEL": model}, workers, data_dir)))


@app.command("api")
@takes(*COMMON, *API)
def api_command(settings: dict[str, str]) -> None:
    """Run one API pod against a Redis."""
    _run_program("api_service", "api", "fastapi", settings)


@app.command("worker")
@takes(*COMMON, *WORKER)
def worker_command(settings: dict[str, str], model: Model = "") -> None:
    """Run one engine worker against a Redis."""
    needs, extra = _worker_needs(settings)
    if importlib.util.find_spec(needs) is not None:
        _check_worker(model, settings)
    _run_program("engine_worker", extra, needs, {**settings, "HEADRACE_MODEL": model})


def _check_worker(model: str, settings: dict[str, str]) -> None:
    trouble = preflight.worker_trouble(model, settings)
    if trouble is not None:
        _fail(trouble, 2)


def _worker_needs(settings: dict[str, str]) -> tuple[str, str]:
    """A module that a worker cannot do without, and the extra that brings it."""
    return ("numpy", "api") if settings.get("HEADRACE_SIMULATE") else ("torch", "worker")


@app.command("chat")
@takes(*SAMPLING)
def chat_command(
    settings: dict[str, str],
    base_url: Annotated[
        str, typer.Option(envvar=["HEADRACE_BASE_URL", "OPENAI_BASE_URL"], help="Any OpenAI-compatible server.")
    ] = "http://127.0.0.1:8000/v1",
    model: Annotated[str, typer.Option(show_default="the server's first", help="Model to talk to.")] = "",
    api_key: Annotated[
        str, typer.Option(envvar=["HEADRACE_API_KEY", "OPENAI_API_KEY"], show_default="none", help="Key to send.")
    ] = "",
    system: Annotated[str, typer.Option(show_default="none", help="System message.")] = "",
) -> None:
    """Chat in the terminal. With input from a pipe: one question in, one answer out."""
    sampling = {flag.field: float(settings[flag.env]) for flag in SAMPLING if flag.env in settings}
    raise typer.Exit(chat.run(base_url.rstrip("/"), model, api_key.split(",")[0].strip(), system, sampling))


@app.command("key-id")
def key_id_command() -> None:
    """Print what API keys (one a line, from standard input) are called in --tenants files and in `headrace status`."""
    keys = [key for line in typer.get_text_stream("stdin") if (key := line.strip())]
    if not keys:
        _fail("no key came. Send keys through standard input: headrace key-id < FILE", 2)
    for key in keys:
        typer.echo(limits.key_id(key))


@app.command("status")
@takes(*COMMON[:2])
def status_command(
    settings: dict[str, str],
    json: AsJson = False,
    worker_on: Annotated[
        str | None, typer.Option(metavar="HOST", help="Only say (exit code) whether a ready worker runs on HOST.")
    ] = None,
    request: Annotated[
        str | None, typer.Option(metavar="ID", help="Only show where this request stands in its queue.")
    ] = None,
) -> None:
    """Show workers, models, queues, expected waits and cache use."""
    if request is not None:
        raise typer.Exit(_look_into(settings, lambda redis: status.show_request(redis, request)))
    raise typer.Exit(_look_into(settings, lambda redis: status.run(redis, _shards(settings), json, worker_on)))


def _shards(settings: dict[str, str]) -> int:
    return int(settings.get("HEADRACE_SHARDS", "1"))


@dead_app.command("list")
@takes(*COMMON[:2])
def dead_list(settings: dict[str, str], json: AsJson = False) -> None:
    """List dead letters, newest first."""
    raise typer.Exit(_look_into(settings, lambda redis: dead.list_letters(redis, _shards(settings), json)))


@dead_app.command("show")
@takes(REDIS_URL)
def dead_show(settings: dict[str, str], request: Rid) -> None:
    """Show one dead letter with its request, as JSON."""
    raise typer.Exit(_look_into(settings, lambda redis: dead.show(redis, request)))


@dead_app.command("replay")
@takes(REDIS_URL)
def dead_replay(settings: dict[str, str], requests: Rids) -> None:
    """Queue requests again, under new ids."""
    raise typer.Exit(_look_into(settings, lambda redis: dead.replay(redis, requests)))


@dead_app.command("drop")
@takes(REDIS_URL)
def dead_drop(settings: dict[str, str], requests: Rids) -> None:
    """Forget requests."""
    raise typer.Exit(_look_into(settings, lambda redis: dead.drop(redis, requests)))


def main() -> None:
    """Entry point of the console script."""
    app()
