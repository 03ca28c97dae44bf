"""The operator's file of tenants: what it means, and that a bad one is refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pydantic import ValidationError

from api_service.settings import Settings, describe_errors
from api_service.tenants import ANONYMOUS, Tenant, Tenants, load_tenants
from shared.limits import Limits, key_id

KEY = key_id("secret")
FILE = f"""
[default]
requests_per_minute = 60

[tenants.team-a]
keys = ["{KEY}"]
users = ["alice", "a name with blanks"]
weight = 2
tokens_per_minute = 1000
max_open_requests = 8
"""
TEAM_A = Tenant("team-a", 2.0, Limits(0, 1000, 8))


@pytest.fixture
def tenants(tmp_path: Path) -> Tenants:
    path = tmp_path / "tenants.toml"
    path.write_text(FILE)
    return load_tenants(path)


@pytest.mark.parametrize(
    ("tenant", "user", "expected"),
    [
        (KEY, None, TEAM_A),
        (KEY, "bob", TEAM_A),  # the key says who it is, whatever the body claims
        (key_id("other"), "alice", Tenant(key_id("other"), 1.0, Limits(60))),
        (ANONYMOUS, "alice", TEAM_A),
        (ANONYMOUS, "a name with blanks", TEAM_A),
        (ANONYMOUS, "bob", Tenant("user:bob", 1.0, Limits(60))),
        (ANONYMOUS, None, Tenant(ANONYMOUS, 1.0, Limits(60))),
        (ANONYMOUS, "", Tenant(ANONYMOUS, 1.0, Limits(60))),
    ],
)
def test_who_a_request_is_counted_for(tenants: Tenants, tenant: str, user: str | None, expected: Tenant) -> None:
    assert tenants.of(tenant, user) == expected


@pytest.mark.parametrize("user", ["two words", "x" * 65, "naïve", "a\nb", "\ud800", "*"])
def test_any_user_makes_a_short_name_without_blanks(user: str) -> None:
    share = Tenants().of(ANONYMOUS, user).share
    assert share.isascii()
    assert len(share) == len("user:") + 16
    assert share != Tenants().of(ANONYMOUS, user + "!").share


def test_json_says_the_same(tmp_path: Path, tenants: Tenants) -> None:
    rule = {"keys": [KEY], "users": ["alice"], "weight": 2, "tokens_per_minute": 1000, "max_open_requests": 8}
    path = tmp_path / "tenants.json"
    path.write_text(json.dumps({"default": {"requests_per_minute": 60}, "tenants": {"team-a": rule}}))
    assert load_tenants(path).of(KEY, None) == tenants.of(KEY, None)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[tenants.a]\nweight = 0", "tenants.a.weight: "),
        ("[tenants.a]\nweight = '2'", "tenants.a.weight: "),
        ("[tenants.a]\nrequests_per_minute = 0", "tenants.a.requests_per_minute: "),
        ("[tenants.a]\nrpm = 3", "tenants.a.rpm: there is no such setting"),
        ("[tenants.'a b']\nweight = 1", "a name has 1 to 64 letters"),
        ("[tenants.a]\nkeys = ['sk-very-secret']", "never the key itself"),
        (f"[tenants.a]\nkeys = ['{KEY}']\n[tenants.b]\nkeys = ['{KEY}']", "tenants.b names key-"),
        ("[tenants", "is not TOML"),
        ("[limits]", "limits: there is no such setting"),
    ],
)
def test_a_bad_file_is_refused_by_name_at_start(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "tenants.toml"
    path.write_text(text)
    with pytest.raises(ValidationError) as refused:
        Settings(tenants=path)
    message = describe_errors(refused.value)
    assert message.startswith(f"HEADRACE_TENANTS='{path}' is not allowed: ")
    assert said in message
    assert "very-secret" not in message


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="cannot be read"):
        Settings(tenants=tmp_path / "none.toml")
