"""The default model's own tokenizer: the ids that bug reports and clients' tests name."""

from __future__ import annotations

import random
from functools import cache

import pytest
from tokenizers import Tokenizer

from engine_worker.models.loading.gguf_file import GgufFile
from engine_worker.models.loading.gguf_text import text_from_gguf
from shared.params import StopConditions
from shared.text.choice_text import ChoiceText
from shared.text.detokenize import Detokenizer
from shared.text.token_bytes import TokenBytes
from tests.support.llama_oracle import default_gguf

pytestmark = pytest.mark.real_model


@cache
def tokenizer_json() -> bytes:
    return text_from_gguf(GgufFile(default_gguf())).tokenizer_json


@cache
def tokens() -> TokenBytes:
    return TokenBytes.from_tokenizer_json(tokenizer_json())


def test_known_ids_are_the_bytes_they_are_said_to_be() -> None:
    assert b"".join(map(tokens().bytes_of, [10813, 121, 250])) == "\U0001fae0".encode()
    assert b"".join(map(tokens().bytes_of, [180, 139, 246])) == "龜".encode()
    assert [tokens().bytes_of(i) for i in (187, 190, 198, 216, 905)] == [b"\xf0", b"\0", b"\n", b" ", b" world"]
    assert tokens().special == frozenset(range(17))


def test_rl_20_random_ids_join_to_the_librarys_decode() -> None:
    library, rng = Tokenizer.from_str(tokenizer_json().decode()), random.Random(1)
    broken = [i for i, data in enumerate(tokens().table) if "\ufffd" in data.decode("utf-8", "replace")]
    assert len(broken) >= 313
    for _ in range(10_000):
        pool = broken if rng.random() < 0.5 else range(library.get_vocab_size())
        ids = [rng.choice(pool) for _ in range(rng.randrange(12))]
        detokenizer = Detokenizer(tokens())
        text = "".join(detokenizer.push([i]) for i in ids) + detokenizer.flush()
        assert text == library.decode(ids)


@pytest.mark.parametrize(("count", "text"), [(1, "\ufffd"), (2, "\ufffd"), (3, "\U0001fae0")])
def test_det_02_an_emoji_cut_by_max_tokens(count: int, text: str) -> None:
    detokenizer = Detokenizer(tokens())
    assert detokenizer.push([10813, 121, 250][:count]) + detokenizer.flush() == text


def test_stp_01_stp_08_the_reported_stop_strings() -> None:
    for include, expected in ((False, " wo"), (True, " world wo")):
        stop = StopConditions(max_tokens=8, stop=("rld wo",), include_stop_str_in_output=include)
        choice = ChoiceText(tokens(), stop)
        pieces = [choice.push(905) for _ in range(2)]
        assert ("".join(text for text, _ in pieces), pieces[-1][1]) == (expected, "rld wo")
