"""A text-completion body -> one GenerateRequest for all its prompts. Pure and blocking: runs in a preparation thread.

Control tokens in a plain prompt are control tokens: this endpoint gives the caller the whole prompt, as OpenAI's
does.
"""

from __future__ import annotations

from api_service.prepare.extensions import extensions, fill_in_the_middle, truncated
from api_service.prepare.limits import COMPLETION_DEFAULT_TOKENS, answer_limit, check_text_length
from api_service.prepare.model import ServedModel
from api_service.prepare.sampling import check_possible, check_token_ids, sampling_params, stop_conditions
from api_service.schemas.completion import CompletionRequest, Prompt
from shared.errors import ContextLengthExceeded
from shared.messages import GenerateRequest

__all__ = ["plain_tokens", "prepare_completion"]


def prepare_completion(body: CompletionRequest, model: ServedModel) -> GenerateRequest:
    """The request without id, tenant and times, which the route adds. Raises InvalidRequest and its kind."""
    body.check()
    paths = [f"prompt[{i}]" if len(body.prompt) > 1 else "prompt" for i in range(len(body.prompt))]
    prompts = [_encode(body, prompt, model, path) for prompt, path in zip(body.prompt, paths, strict=True)]
    limits = [
        answer_limit(
            model,
            len(ids),
            body.max_tokens,
            default=COMPLETION_DEFAULT_TOKENS,
            param=path,
            asked_param="max_tokens",
        )
        for ids, path in zip(prompts, paths, strict=True)
    ]
    scores = body.scored_alternatives
    echo = (
        [_text(body, prompt, ids, model) for prompt, ids in zip(body.prompt, prompts, strict=True)] if body.echo else []
    )
    sampling = sampling_params(body, model, body.logprobs, scores)
    stop = stop_conditions(body, model, min(limits))
    check_possible(sampling, stop, model)
    return GenerateRequest(
        rid="",
        model=model.card.name,
        prompts=tuple(map(tuple, prompts)),
        sampling=sampling,
        stop=stop,
        n=body.n or 1,
        kind="completion",
        echo=tuple(echo),
        include_usage=body.include_usage,
        continuous_usage=body.continuous_usage,
        fingerprint=model.card.fingerprint,
        tokenizer=model.card.tokenizer,
        **extensions(body),
    )


def _encode(body: CompletionRequest, prompt: Prompt, model: ServedModel, path: str) -> list[int]:
    cut = body.truncate_prompt_tokens is not None
    ids = plain_tokens(prompt, model, path, add_special_tokens=body.add_special_tokens, cut=cut)
    ids = truncated(body, ids, model, body.max_tokens)
    return fill_in_the_middle(model, ids, body.suffix) if body.suffix else ids


def plain_tokens(
    prompt: Prompt, model: ServedModel, path: str, *, add_special_tokens: bool | None, cut: bool
) -> list[int]:
    """A text as token ids, BOS in front where the model wants one; ids as they are. `cut`: they may be too many.

    Raises InvalidRequest and ContextLengthExceeded.
    """
    if isinstance(prompt, str):
        check_text_length(model, prompt, path)
        ids = model.vocabulary.encode(prompt)
        bos = model.bos_token_id if add_special_tokens is not False else None
        return ids if bos is None else [bos, *ids]
    if len(prompt) > model.window and not cut:
        raise ContextLengthExceeded(
            f"This model's maximum context length is {model.window} tokens. "
            f"However, your prompt has {len(prompt)} tokens.",
            param=path,
        )
    check_token_ids(prompt, model, path)
    return prompt


def _text(body: CompletionRequest, prompt: Prompt, ids: list[int], model: ServedModel) -> str:
    """What `echo` gives back: the text as it came, or the text of the ids, special tokens included."""
    if isinstance(prompt, str) and body.truncate_prompt_tokens is None:
        return prompt
    return b"".join(map(model.vocabulary.token_bytes.bytes_of, ids)).decode(errors="replace")
