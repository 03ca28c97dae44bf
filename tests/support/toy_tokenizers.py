"""Small tokenizers of every kind a model brings, made with the tokenizers library, which is also the tests' oracle."""

from __future__ import annotations

from functools import cache
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CORPUS = [
    "The quick brown fox jumps over the lazy dog. Hello world, world world!",
    "日本語のテキストと龜と한국어 텍스트를 섞는다. Größe, naïve, señor.",
    "🫠 emoji 👩‍👩‍👧 and more 🎉🎉 ☃ and accents éàü; \u2028 line separators\n\n",
]
_SPACE = "\u2581"


@cache
def byte_level() -> Tokenizer:
    """Byte-level BPE over the whole byte alphabet, with three special tokens and one added token that is none."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 3, trainer)
    tokenizer.add_tokens([AddedToken("<tool> ü 工", special=False)])
    return tokenizer


def _sentencepiece_vocab() -> dict[str, int]:
    pieces = [f"<0x{byte:02X}>" for byte in range(256)]
    pieces += [_SPACE, _SPACE * 2, f"{_SPACE}Hello", f"{_SPACE}world", "wor", "ld", "a", "b", "c", "日", "é", "<0xZZ>"]
    return {piece: i for i, piece in enumerate(["<unk>", "<s>", "</s>", *pieces])}


def _sentencepiece(decoder: Any) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(vocab=_sentencepiece_vocab(), merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoder
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


@cache
def llama2() -> Tokenizer:
    """SentencePiece BPE with byte fallback; one leading space of the whole text is stripped."""
    return _sentencepiece(
        decoders.Sequence(
            [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
    )


@cache
def gemma() -> Tokenizer:
    """Byte fallback, nothing stripped."""
    return _sentencepiece(decoders.Sequence([decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]))


@cache
def metaspace() -> Tokenizer:
    """The Metaspace decoder: the first token loses its space marks."""
    return _sentencepiece(decoders.Metaspace())


@cache
def unigram() -> Tokenizer:
    """Unigram model with a Metaspace decoder that keeps the first space."""
    pieces = [(piece, -float(i)) for piece, i in _sentencepiece_vocab().items()]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=False))
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="never")
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer
