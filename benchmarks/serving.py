"""Whole servers against each other: HTTP in, tokens out, the client on the same machine, in turns.

    python -m benchmarks.serving --server "headrace=headrace serve --port {port} --dtype bfloat16" \
        --server "peer:model-name=peer-server --port {port}" [--rounds 3] [--scenario single,closed32] [--json FILE]

The first server is the one the ratios are about. Every round runs each scenario on each server in turn; the table shows
medians. Servers that are not measured are stopped (SIGSTOP), but keep their memory.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path

from benchmarks._serving.client import Client, Prompts
from benchmarks._serving.scenarios import SCENARIOS, Figures, scenarios
from benchmarks._serving.servers import Server

DEFAULT_MODEL = "SmolLM2-135M-Instruct"
DEFAULT_SERVERS = [
    f"{dtype}={sys.executable} -m headrace serve --port {{port}} --dtype {dtype}" for dtype in ("bfloat16", "float32")
]
Results = dict[str, dict[str, list[Figures]]]
"""Scenario, server, one entry per round."""


def parse_server(text: str, logs: Path) -> Server:
    """NAME[:MODEL]=COMMAND."""
    head, found, command = text.partition("=")
    name, _, model = head.partition(":")
    if not found or not name:
        raise SystemExit(f"--server {text!r}: NAME=COMMAND or NAME:MODEL=COMMAND is needed")
    return Server(name, command, model or DEFAULT_MODEL, logs / f"{name}.log")


async def measure(server: Server, scenario: str, round_: int, rate: float) -> Figures:
    """One scenario once, after a short warm-up. The same prompts for every server."""
    async with Client(server.url, server.model) as client:
        warm = Prompts(f"warm/{server.name}/{scenario}/{round_}")
        await asyncio.gather(*[client.stream(warm.make(64), 8) for _ in range(8)])
        return await scenarios(rate)[scenario](client, Prompts(f"{scenario}/{round_}"))


async def first_token_s(server: Server, started: float) -> float:
    """Seconds from `started` to the first token of the first request."""
    async with Client(server.url, server.model) as client:
        answer = await client.stream(Prompts("first").make(16), 1)
        return answer.arrivals[0] - started if answer.arrivals else math.nan


def median(rounds: list[Figures], name: str) -> float:
    return statistics.median(figures[name] for figures in rounds)


def show(results: Results, servers: list[Server]) -> None:
    """A table per scenario: medians (lowest and highest), and the first server's ratio to each other one."""
    for scenario, by_server in results.items():
        print(f"\n{scenario}")
        first = servers[0].name
        for figure in by_server[first][0]:
            cells = []
            for server in servers:
                values = [figures[figure] for figures in by_server[server.name]]
                middle = statistics.median(values)
                ratio = median(by_server[first], figure) / middle if middle else math.nan
                against = "" if server.name == first else f"  x{ratio:.2f}"
                cells.append(f"{server.name} {middle:.4g} ({min(values):.4g}-{max(values):.4g}){against}")
            print(f"  {figure:18} " + " | ".join(cells))
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--server", action="append", metavar="NAME[:MODEL]=COMMAND", help="repeat it; {port} is filled in"
    )
    parser.add_argument("--scenario", default=",".join(SCENARIOS), help=f"of {', '.join(SCENARIOS)}")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rate", type=float, default=2.68, help="poisson120: requests a second")
    parser.add_argument("--json", type=Path, help="write every round's figures here")
    args = parser.parse_args()
    chosen = args.scenario.split(",")
    if unknown := set(chosen) - set(SCENARIOS):
        parser.error(f"no scenario {', '.join(sorted(unknown))}; there are {', '.join(SCENARIOS)}")

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that servers end with it
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as logs:
        servers = [parse_server(text, Path(logs)) for text in args.server or DEFAULT_SERVERS]
        results: Results = {scenario: {server.name: [] for server in servers} for scenario in chosen}
        try:
            for server in servers:
                started = time.perf_counter()
                server.start()
                print(
                    f"{server.name}: {asyncio.run(first_token_s(server, started)):.1f} s from start to first token",
                    flush=True,
                )
                server.pause()
            for round_ in range(args.rounds):
                for scenario in chosen:
                    for server in servers:
                        server.resume()
                        figures = asyncio.run(measure(server, scenario, round_, args.rate))
                        server.pause()
                        results[scenario][server.name].append(figures)
                        print(round_, scenario, server.name, json.dumps(figures), flush=True)
                        if args.json:
                            args.json.write_text(json.dumps(results, indent=1))
            show(results, servers)
            for server in servers:
                print(f"{server.name}: {server.memory_mib():.0f} MiB resident")
        finally:
            for server in servers:
                server.stop()


if __name__ == "__main__":
    main()
