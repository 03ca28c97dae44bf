"""Matchers of compiled grammars against toy tokenizers: what may follow, where an end is allowed, white space."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import pytest

from shared.grammars.backend import MAX_INDENT, GrammarError, TokenMatcher, fill_masks
from shared.grammars.compiler import GrammarCompiler
from shared.params import GrammarSpec
from shared.text.token_bytes import TokenBytes
from tests.support import toy_tokenizers

END = 2


def compiler_for(tokenizer: Any) -> tuple[GrammarCompiler, TokenBytes, int]:
    document = tokenizer.to_str().encode()
    table = TokenBytes.from_tokenizer_json(document)
    size = len(table.table)
    return GrammarCompiler(document, table, (END,), size), table, size


def write(matcher: TokenMatcher, table: TokenBytes, size: int, wish: bytes, limit: int = 200) -> bytes:
    """Follows the grammar, preferring tokens that begin with a byte of `wish`; returns the whole text at its end."""
    output: list[int] = []
    for _ in range(limit):
        matcher.follow(output)
        allowed = np.flatnonzero(fill_masks([matcher], size)[0]).tolist()
        assert allowed, "nothing can follow"
        if allowed == [END]:
            return b"".join(map(table.bytes_of, output))
        wished = [i for i in allowed if table.bytes_of(i)[:1] in [bytes([byte]) for byte in wish]]
        output.append((wished or [i for i in allowed if i != END])[0])
    raise AssertionError(f"no end after {limit} tokens")


@pytest.mark.parametrize("name", ["byte_level", "llama2", "gemma", "metaspace", "unigram"])
def test_str_05_white_space_is_bounded_for_every_kind_of_tokenizer(name: str) -> None:
    compiler, table, size = compiler_for(getattr(toy_tokenizers, name)())
    schema = {
        "type": "object",
        "properties": {"a": {"type": "boolean"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    if name in ("metaspace", "unigram"):  # hardly a letter in their vocabularies
        compiler.matcher(GrammarSpec("regex", "(a|b|c)*"), 1000)
        return
    for wish in (b" \n\t", b"\n \t", b"\t\n "):
        text = write(compiler.matcher(GrammarSpec("json_schema", json.dumps(schema)), 1000), table, size, wish).decode()
        assert isinstance(json.loads(text)["a"], bool)
        assert text == text.strip()
        runs = re.findall(r"\s+", text)
        assert runs
        assert all(re.fullmatch(rf" {{1,2}}|\n[ \t]{{0,{MAX_INDENT}}}", run) for run in runs), runs


def test_a_matcher_that_starts_with_output_stands_where_another_got_to() -> None:
    compiler, table, size = compiler_for(toy_tokenizers.byte_level())
    spec = GrammarSpec("json_schema", json.dumps({"enum": ['日本🫠 "q" \\ /']}))
    stepwise = compiler.matcher(spec, 1000)
    output: list[int] = []
    while True:
        stepwise.follow(output)
        fresh = compiler.matcher(spec, 1000)
        fresh.follow(output)
        masks = fill_masks([stepwise, fresh], size)
        assert (masks[0] == masks[1]).all()
        allowed = np.flatnonzero(masks[0]).tolist()
        if allowed == [END]:
            break
        output.append(allowed[-1])
    assert json.loads(b"".join(map(table.bytes_of, output))) == '日本🫠 "q" \\ /'


def test_special_tokens_never_stand_for_their_text() -> None:
    compiler, table, size = compiler_for(toy_tokenizers.byte_level())
    matcher = compiler.matcher(GrammarSpec("regex", r"<\|im_start\|>"), 1000)
    allowed = np.flatnonzero(fill_masks([matcher], size)[0]).tolist()
    assert not table.special & set(allowed)
    assert allowed


def test_output_that_does_not_fit_leaves_nothing_to_follow_and_no_neighbour_suffers() -> None:
    compiler, _, size = compiler_for(toy_tokenizers.byte_level())
    good, bad = (compiler.matcher(GrammarSpec("regex", "a+"), 1000) for _ in range(2))
    bad.follow([END + 20])
    masks = fill_masks([bad, good], size)
    assert bad.failed
    assert not masks[0].any()
    assert masks[1].any()


def test_what_cannot_be_compiled_is_an_error_for_the_client() -> None:
    compiler, _, _ = compiler_for(toy_tokenizers.byte_level())
    for spec in (
        GrammarSpec("regex", "("),
        GrammarSpec("json_schema", '{"type": "foo"}'),
        GrammarSpec("json_schema", "1"),
    ):
        with pytest.raises(GrammarError):
            compiler.matcher(spec, 1000)


def test_a_model_without_an_end_token_has_none() -> None:
    document = toy_tokenizers.byte_level().to_str().encode()
    with pytest.raises(ValueError, match="end token"):
        GrammarCompiler(document, TokenBytes.from_tokenizer_json(document), (), 400)


def test_special_tokens_are_no_text_where_anything_may_follow_either() -> None:
    compiler, table, size = compiler_for(toy_tokenizers.byte_level())
    matcher = compiler.matcher(GrammarSpec("regex", r"(?s:.*)"), 1000)
    allowed = set(np.flatnonzero(fill_masks([matcher], size)[0]).tolist())
    assert allowed & table.special == {END}
    assert len(allowed) > 100
