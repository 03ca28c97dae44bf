"""lm-eval's own `local-completions` model on a task of a few questions, scored by transformers on the same weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model
from lm_eval.utils import RemoteTokenizer

from tests.e2e.clients.conftest import KEY
from tests.e2e.conftest import REAL_MODEL
from tests.support.llama_oracle import default_gguf
from tests.support.stack import Pod

pytestmark = [pytest.mark.real_model, pytest.mark.timeout(240)]

QUESTIONS = [
    ("The capital of France is", [" Paris", " London", " a very large sandwich"]),
    ("Question: what is 2 + 2?\nAnswer:", [" 4", " 22", " Tuesday"]),
    ("Ärger mit Ümläuten, 日本", ["語 ist schön 🫠", "x"]),
]
"""The right answer first."""
PASSAGE = "Rivers flow to the sea. The naïve 水车 turns 🌊 slowly. " * 3


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that AutoTokenizer loads, as transformers itself makes it of the model's file."""
    path = default_gguf()
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name).save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)


@pytest.fixture
def options(pod: Pod, tokenizer: Path) -> dict[str, Any]:
    url = f"{pod.base_url}/completions"
    return {"base_url": url, "model": REAL_MODEL, "tokenizer": str(tokenizer), "tokenizer_backend": "huggingface"}


def requests_of(kind: str, arguments: list[tuple[Any, ...]]) -> list[Instance]:
    return [Instance(request_type=kind, doc={}, arguments=args, idx=i) for i, args in enumerate(arguments)]


def reference_score(reference: Any, context: list[int], continuation: list[int]) -> tuple[float, bool]:
    """Sum of the continuation's log-probabilities, and whether each of its tokens is the likeliest."""
    ids = torch.tensor([context + continuation])
    with torch.inference_mode():
        rows = reference(ids).logits[0, len(context) - 1 : -1].log_softmax(-1)
    chosen = torch.tensor(continuation)
    return float(rows.gather(1, chosen[:, None]).sum()), bool((rows.argmax(1) == chosen).all())


@pytest.mark.parametrize("how", [{}, {"batch_size": 4}, {"num_concurrent": 4}, {"tokenized_requests": False}], ids=str)
def test_loglikelihood_equals_transformers(options: dict[str, Any], reference: Any, how: dict[str, Any]) -> None:
    model = get_model("local-completions")(**options, **how)
    pairs = [(question, answer) for question, answers in QUESTIONS for answer in answers]
    scores = model.loglikelihood(requests_of("loglikelihood", pairs), disable_tqdm=True)
    for (question, answer), (score, greedy) in zip(pairs, scores, strict=True):
        wanted, wanted_greedy = reference_score(reference, *model._encode_pair(question, answer))
        assert score == pytest.approx(wanted, abs=1e-2), (question, answer)
        assert greedy == wanted_greedy, (question, answer)
    assert any(greedy for _, greedy in scores)
    best = dict.fromkeys(question for question, _ in QUESTIONS)
    for (question, answer), (score, _) in zip(pairs, scores, strict=True):
        if best[question] is None or score > best[question][0]:
            best[question] = (score, answer)
    assert best[QUESTIONS[0][0]][1] == " Paris"


def test_loglikelihood_of_a_whole_passage(options: dict[str, Any], reference: Any) -> None:
    model = get_model("local-completions")(**options)
    [score] = model.loglikelihood_rolling(requests_of("loglikelihood_rolling", [(PASSAGE,)]), disable_tqdm=True)
    wanted, _ = reference_score(reference, [model.prefix_token_id], model.tok_encode(PASSAGE))
    assert score == pytest.approx(wanted, abs=1e-2)


def test_tokens_may_be_the_servers_own(options: dict[str, Any], reference: Any) -> None:
    """Nothing but an address: lm-eval asks whether the server tells its tokens. For that it needs the key as well."""
    theirs = get_model("local-completions")(**options)
    ours = get_model("local-completions")(base_url=options["base_url"], model=REAL_MODEL, auth_token=KEY)
    assert isinstance(ours.tokenizer, RemoteTokenizer)
    assert (ours.eot_token_id, ours.eos_string) == (theirs.eot_token_id, theirs.eos_string)
    assert ours.prefix_token_id == theirs.prefix_token_id
    texts = [PASSAGE, *(question + answer for question, answers in QUESTIONS for answer in answers)]
    assert ours.tok_encode(texts) == theirs.tok_encode(texts)
    assert ours.decode_batch(ours.tok_encode(texts)) == texts
    question, [answer, *_] = QUESTIONS[0]
    [(score, greedy)] = ours.loglikelihood(requests_of("loglikelihood", [(question, answer)]), disable_tqdm=True)
    wanted, wanted_greedy = reference_score(reference, *theirs._encode_pair(question, answer))
    assert (score, greedy) == (pytest.approx(wanted, abs=1e-2), wanted_greedy)


def test_generate_until(options: dict[str, Any]) -> None:
    model = get_model("local-completions")(**options)
    arguments = ("The capital of France is", {"until": ["."], "max_gen_toks": 8, "temperature": 0})
    assert model.generate_until(requests_of("generate_until", [arguments]), disable_tqdm=True) == [" Paris"]
    chat = options | {"base_url": options["base_url"].replace("/completions", "/chat/completions"), "tokenizer": None}
    model = get_model("local-chat-completions")(**chat | {"tokenizer_backend": None})
    prompt = model.apply_chat_template([{"role": "user", "content": "What is the capital of France?"}])
    assert json.loads(prompt.prompt)
    arguments = (prompt, {"until": ["."], "max_gen_toks": 24, "temperature": 0})
    [text] = model.generate_until(requests_of("generate_until", [arguments]), disable_tqdm=True)
    assert "Paris" in text
