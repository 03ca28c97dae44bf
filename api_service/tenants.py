"""Who a request is counted for, and what that one may do: from API key or `user` field, and the operator's file.

In: a TOML or JSON file (tenant_file.py reads it again when it changes). Out: a `Tenant` per request. What is wrong in
the file is refused by name.

    [default]                       # everyone who is not named below, each for himself
    requests_per_minute = 60

    [tenants.team-a]                # one share of the service for all its keys and users
    keys = ["key-3a1f5c0e9b2d4f68"] # as `headrace key-id` prints them
    users = ["alice"]               # the `user` field, where no API keys are in use
    weight = 2
    tokens_per_minute = 100000
    max_open_requests = 8
"""

from __future__ import annotations

import hashlib
import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from shared.limits import NO_LIMITS, Limits

__all__ = ["ANONYMOUS", "Tenant", "Tenants", "load_tenants"]

ANONYMOUS = "default"
"""Tenant of every request when no keys are set."""
_PLAIN = re.compile(r"[\w.@:+/-]{1,64}", re.ASCII)
_Name = Annotated[str, StringConstraints(pattern=r"^[\w.@:+/-]{1,64}$")]
_KeyId = Annotated[str, StringConstraints(pattern=r"^key-[0-9a-f]{16}$")]
_Count = Annotated[int, Field(ge=1, le=10**12)]


@dataclass(frozen=True, slots=True)
class Tenant:
    share: str
    """Name under which its tokens are counted; without blanks."""
    weight: float = 1.0
    limits: Limits = NO_LIMITS


class _Rule(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    weight: Annotated[float, Field(ge=0.01, le=1000, allow_inf_nan=False)] = 1.0
    requests_per_minute: _Count | None = None
    tokens_per_minute: _Count | None = None
    max_open_requests: _Count | None = None

    def tenant(self, share: str) -> Tenant:
        limits = Limits(self.requests_per_minute or 0, self.tokens_per_minute or 0, self.max_open_requests or 0)
        return Tenant(share, self.weight, limits)


class _NamedRule(_Rule):
    keys: list[_KeyId] = []
    users: list[Annotated[str, Field(min_length=1, max_length=512)]] = []


class _File(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    default: _Rule = _Rule()
    tenants: dict[_Name, _NamedRule] = {}


class Tenants:
    """The rules of one file, or none."""

    def __init__(self, rules: _File | None = None) -> None:
        """Raises ValueError when a key or user is named twice."""
        rules = rules or _File()
        self._default = rules.default
        self._named: dict[str, Tenant] = {}
        for name, rule in rules.tenants.items():
            for who in (*rule.keys, *map(_user_share, rule.users)):
                if who in self._named:
                    raise ValueError(f"tenants.{name} names {who}, and so does tenants.{self._named[who].share}")
                self._named[who] = rule.tenant(name)

    def of(self, tenant: str, user: str | None) -> Tenant:
        """`tenant`: as the API key says, ANONYMOUS without keys; only then `user` counts, which anyone can write."""
        who = _user_share(user) if user and tenant == ANONYMOUS else tenant
        return self._named.get(who) or self._default.tenant(who)


def _user_share(user: str) -> str:
    """Readable where it can be; anything else, also what is long or has blanks, by its hash."""
    if _PLAIN.fullmatch(user):
        return f"user:{user}"
    return "user:" + hashlib.sha256(user.encode(errors="surrogatepass")).hexdigest()[:16]


def load_tenants(path: Path | None) -> Tenants:
    """The file's rules; None = no file, no limits, equal weights. Raises ValueError with all that is wrong."""
    if path is None:
        return Tenants()
    try:
        return Tenants(_File.model_validate(_read(path)))
    except ValidationError as error:
        raise ValueError("; ".join(map(_explain, error.errors(include_url=False)))) from None


def _read(path: Path) -> Mapping[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
        content: Any = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except OSError as error:
        raise ValueError(f"cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"is not {'JSON' if path.suffix == '.json' else 'TOML'}: {error}") from None
    if not isinstance(content, dict):
        raise ValueError("must hold an object")
    return content


def _explain(item: Any) -> str:
    """Pydantic's error as "tenants.team-a.weight: must be …"; never a value of `keys`, which may be a key."""
    where = ".".join(str(part) for part in item["loc"] if part != "[key]")
    if item["type"] == "extra_forbidden":
        return f"{where}: there is no such setting"
    reason = item["msg"].replace("Input should be", "must be", 1)
    if "keys" in item["loc"]:
        reason = "must be a key's id as `headrace key-id` prints it, never the key itself"
    elif item["loc"][-1] == "[key]":
        reason = "a name has 1 to 64 letters, digits and . _ @ : + / -"
    return f"{where}: {reason[:1].lower()}{reason[1:]}"
