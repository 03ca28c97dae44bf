"""What llama.cpp's own tokenizer makes of texts, recorded: an oracle that needs no llama.cpp where tests run.

In: the name of a vocabulary. Out: texts and ids, from tests/data/llama_cpp_tokens.json. The file was written by
`python -m tests.support.llama_cpp_tokens` where the package llama-cpp-python is installed; run that again after a
change of the vocabularies or texts here. Special tokens are plain text in it, and no BOS is added.
"""

from __future__ import annotations

import importlib
import json
import random
import tempfile
from pathlib import Path
from typing import Any

from engine_worker.models.loading.gguf_file import GgufFile
from tests.support.gguf_model import write_gguf
from tests.support.llama_oracle import default_gguf

__all__ = ["PRE_TOKENIZERS", "TEXTS", "recorded", "spm_metadata", "write_default_vocabulary"]

DATA = Path(__file__).resolve().parents[1] / "data" / "llama_cpp_tokens.json"
PRE_TOKENIZERS = ("gpt-2", "default", "llama-bpe", "qwen2", "smollm", "starcoder", "tekken")
TEXTS = [
    "",
    " ",
    "Hello world",
    "  two  spaces ",
    "line\nbreak\n\n\nend\n",
    "tab\tand\r\nwindows",
    "It's we'll THEY'RE i'd",
    "1234567 3.14 1,000 ²",
    "日本語 und größer, naïve café",
    "🫠🫠 family 👨‍👩‍👧 \u2028 \u00a0",
    "!!! ... --- ///",
    "a" * 50,
    "def f(x):\n    return x**2  # done",
]
_SPM_TEXTS = ["hello world", " the  world", "the\nworld", "é日本 12", "🫠", "hell o"]
_ALPHABET = "abcXYZ  \n\t'.,!?-_(){}0123456789éßñ日本語🫠\u00a0\u3000"


def recorded(vocabulary: str) -> dict[str, list[int]]:
    """text -> ids by llama.cpp."""
    cases: dict[str, dict[str, list[int]]] = json.loads(DATA.read_text(encoding="utf-8"))["ids"]
    return cases[vocabulary]


def write_default_vocabulary(path: Path, pre: str) -> None:
    """The default model's merges under another model's cutting rule."""
    source = GgufFile(default_gguf()).metadata
    kept = {key: value for key, value in source.items() if not key.startswith("general")}
    write_gguf(path, kept | {"tokenizer.ggml.pre": pre, "general.architecture": "llama"}, {})


def spm_metadata(**changes: Any) -> dict[str, Any]:
    """A SentencePiece vocabulary: three control tokens, all bytes, and pieces of a few words, longest best."""
    pieces = ["▁", "▁the", "▁world", "▁hello", "hello", "he", "ll", "llo", "o", "h", "e", "l", "t", "th", "the", "▁t"]
    pieces += ["▁th", "▁w", "w", "r", "d", "or", "orld", "ld", "▁h", "▁he", "▁hell", "1", "2", "\n", "é", "日", "▁▁"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    scores = [0.0] * 259 + [float(-number) for number in range(len(pieces))]
    types = [2, 3, 3, *[6] * 256, *[1] * len(pieces)]
    return {
        "general.architecture": "llama",
        "llama.context_length": 64,
        "llama.embedding_length": 32,
        "llama.block_count": 1,
        "llama.feed_forward_length": 32,
        "llama.attention.head_count": 2,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    } | changes


def main() -> None:
    """Records everything anew."""
    llama_cpp = importlib.import_module("llama_cpp")
    rng = random.Random(0)
    texts = [*TEXTS, *("".join(rng.choices(_ALPHABET, k=rng.randint(1, 40))) for _ in range(40))]
    ids: dict[str, dict[str, list[int]]] = {}

    def record(vocabulary: str, path: Path, samples: list[str]) -> None:
        model = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
        ids[vocabulary] = {
            text: model.tokenize(text.encode(), add_bos=False, special=False) if text else [] for text in samples
        }

    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "vocabulary.gguf"
        record("default model", default_gguf(), texts)
        for name in PRE_TOKENIZERS:
            write_default_vocabulary(path, name)
            record(name, path, texts)
        for prefix in (True, False):
            write_gguf(path, spm_metadata(**{"tokenizer.ggml.add_space_prefix": prefix}), {})
            record(f"spm, prefix {prefix}", path, _SPM_TEXTS)
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(case, ensure_ascii=True)}" for name, case in ids.items())
    made = json.dumps(f"llama-cpp-python {llama_cpp.__version__}")
    DATA.parent.mkdir(exist_ok=True)
    DATA.write_text(f'{{"made_with": {made}, "ids": {{\n{lines}\n}}}}\n', encoding="utf-8")


if __name__ == "__main__":
    main()
