"""The vocabulary of a simulated worker that was given no model: bytes for prompts, made-up words for answers."""

from __future__ import annotations

from itertools import product

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from engine_worker.models.loading.text_assets import TextAssets

__all__ = ["NAME", "built_in_text"]

NAME = "simulated"
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_SYLLABLES = ("ba", "de", "fi", "go", "hu", "ka", "le", "mi", "no", "pu", "ra", "se", "ti", "vo", "wu", "xa")
_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def built_in_text() -> TextAssets:
    """515 tokens: three special ones, one a byte, 256 words with the space before them, which prompts never hold."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [f"Ġ{first}{second}" for first, second in product(_SYLLABLES, _SYLLABLES)]
    vocabulary = {token: i for i, token in enumerate([*_SPECIAL, *alphabet, *words])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in _SPECIAL])
    return TextAssets(
        tokenizer_json=tokenizer.to_str().encode(),
        chat_template=_TEMPLATE,
        special_tokens={"bos_token": _SPECIAL[1], "eos_token": _SPECIAL[2]},
        add_bos=False,
        eos_token_ids=(vocabulary["<|endoftext|>"], vocabulary["<|im_end|>"]),
    )
