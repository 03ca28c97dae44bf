"""The tenants' file while a pod runs: edited, replaced, broken, taken away, brought back."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from api_service.tenant_file import TenantFile
from tests.support.wait import eventually

USER = "user:alice"


def rules(weight: int) -> str:
    return f'[tenants.team]\nusers = ["alice"]\nweight = {weight}\n'


@asynccontextmanager
async def watched(path: Path | None) -> AsyncIterator[tuple[TenantFile, list[bool]]]:
    heard: list[bool] = []
    file = TenantFile(path, heard.append, look_s=0.01)
    file.start()
    try:
        yield file, heard
    finally:
        await file.close()


def weight(file: TenantFile) -> float:
    return file.tenants.of("default", "alice").weight


async def test_a_change_holds_without_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "tenants.toml"
    path.write_text(rules(2))
    async with watched(path) as (file, heard):
        assert (weight(file), heard) == (2.0, [True])
        path.write_text(rules(30))
        await eventually(lambda: weight(file) == 30.0)
        assert all(heard)


async def test_a_link_that_points_elsewhere_is_a_change(tmp_path: Path) -> None:
    for number in (2, 3):
        (tmp_path / f"{number}.toml").write_text(rules(number))
    path = tmp_path / "tenants.toml"
    path.symlink_to(tmp_path / "2.toml")
    async with watched(path) as (file, _):
        other = tmp_path / "new"
        other.symlink_to(tmp_path / "3.toml")
        other.rename(path)
        await eventually(lambda: weight(file) == 3.0)


@pytest.mark.parametrize("broken", ["[tenants.team\n", "[tenants.team]\nweight = -1\n", None])
async def test_a_broken_or_missing_file_takes_nothing_away_and_says_so(tmp_path: Path, broken: str | None) -> None:
    path = tmp_path / "tenants.toml"
    path.write_text(rules(2))
    with capture_logs() as logs:
        async with watched(path) as (file, heard):
            if broken is None:
                path.unlink()
            else:
                path.write_text(broken)
            await eventually(lambda: heard[-1] is False)
            assert weight(file) == 2.0
            path.write_text(rules(4))
            await eventually(lambda: weight(file) == 4.0)
            assert heard[-1] is True
    assert [entry["log_level"] for entry in logs if "not used" in entry["event"]] == ["warning"]


def test_a_wrong_file_is_refused_at_the_start(tmp_path: Path) -> None:
    path = tmp_path / "tenants.toml"
    path.write_text("[tenants.team]\nweight = 0\n")
    with pytest.raises(ValueError, match=r"tenants\.team\.weight"):
        TenantFile(path, lambda _: None)


async def test_without_a_file_there_is_nothing_to_watch() -> None:
    async with watched(None) as (file, heard):
        assert (weight(file), heard) == (1.0, [True])
