"""Log-likelihoods of continuations of a context that was read into a packed cache.

A forward over context and continuation together attends to all of them in full precision, so every scheme would give
the same figures. Here the context is prefilled, except for its last token, and that token and the continuation follow
in calls of their own. So every scored distribution reads the context as it is stored.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..accelerate_hooks import device_of
from ..errors import KVPassError
from ..models.arguments import filling
from ..models.probe import fresh_cache

Request = tuple[Sequence[int], Sequence[int]]
"""The tokens of a context, and those of a continuation."""


@dataclass(frozen=True)
class Likelihood:
    """total: log-likelihood of the continuation in nats; greedy: whether each of its tokens is the most likely one."""

    total: float
    greedy: bool


@torch.no_grad()
def likelihoods(
    model: nn.Module,
    requests: Sequence[Request],
    *,
    batch: int = 8,
    token_by_token: bool = False,
    done: Callable[[], object] = lambda: None,
) -> list[Likelihood]:
    """The likelihood of each continuation under ``model`` in its current state, packed or not.

    A context that several requests share is prefilled once, and its cache is repeated for up to ``batch`` of them.

    token_by_token: feed the continuation one token at a time, as ``generate`` does, so that its own tokens are packed
        when they leave the window. By default it is one call, whose tokens attend to each other in full precision.
    done: called after each request.

    Raises `KVPassError` for an empty context or continuation.
    """
    prompts: dict[tuple[int, ...], list[int]] = {}
    for index, (context, continuation) in enumerate(requests):
        if not context or not continuation:
            raise KVPassError("A likelihood needs at least one token of context and one token of continuation.")
        prompts.setdefault(tuple(context[:-1]), []).append(index)
    found: dict[int, Likelihood] = {}
    for prompt, members in prompts.items():
        for start in range(0, len(members), batch):
            part = members[start : start + batch]
            fed = [[requests[i][0][-1], *requests[i][1][:-1]] for i in part]
            for i, logits in zip(part, _logits(model, prompt, fed, token_by_token), strict=True):
                found[i] = _likelihood(logits, requests[i][1])
                done()
    return [found[index] for index in range(len(requests))]


def _logits(model: nn.Module, prompt: Sequence[int], fed: list[list[int]], token_by_token: bool) -> Tensor:
    """Logits ``[N, S, V]`` after each token of ``fed``, N rows of up to S tokens, which follow ``prompt``. Shorter rows
    are padded at the end, where nothing that counts attends to them."""
    cache, longest = fresh_cache(model), max(map(len, fed))
    if prompt:
        model(input_ids=_ids(model, [prompt]), **filling(model, cache, 1))
        if len(fed) > 1:
            cache.batch_repeat_interleave(len(fed))
    ids = _ids(model, [[*row, *row[-1:] * (longest - len(row))] for row in fed])
    parts = ids.split(1 if token_by_token else longest, 1)
    return torch.cat([model(input_ids=part, **filling(model, cache)).logits for part in parts], 1)


def _likelihood(logits: Tensor, continuation: Sequence[int]) -> Likelihood:
    """The likelihood of ``continuation`` under the first rows of ``logits`` ``[S, V]``."""
    wanted = torch.tensor(list(continuation), device=logits.device)
    logits = logits[: len(wanted)].float()
    total = logits.log_softmax(-1).gather(1, wanted[:, None]).sum()
    return Likelihood(float(total), bool((logits.argmax(-1) == wanted).all()))


def _ids(model: nn.Module, rows: Sequence[Sequence[int]]) -> Tensor:
    return torch.tensor([list(row) for row in rows], device=device_of(model))
