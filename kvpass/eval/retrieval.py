"""Passkey retrieval (arXiv 2305.16300): hide a number in filler text, at a chosen length and depth, and ask for it.

The text is read first, and the question follows in a call of its own, as in a chat. So the whole question and every
token of the answer attend to the text as it is stored. A question inside the prompt would be read in full precision,
and most of the answer with it.
"""

import copy
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from ..accelerate_hooks import device_of
from ..errors import KVPassError
from ..models.arguments import CACHE, filling
from ..models.probe import fresh_cache
from ..progress import bar
from .quality import packed
from .size import Scheme

_NEEDLE = "The pass key is {key}. Remember it. {key} is the pass key."
_TASK = "There is a pass key hidden in the following text. Find it and remember it.\n\n"
_QUESTION = "What is the pass key? Answer with the number."
_ANSWER_TOKENS = 16
Asked = TypeVar("Asked")
Answered = TypeVar("Answered")


@dataclass(frozen=True)
class Passkey:
    """text: ``[1, S]`` tokens that hide ``key``; question: ``[1, Q]`` tokens that ask for it."""

    text: Tensor
    question: Tensor
    key: str


@dataclass(frozen=True)
class Retrieval:
    """The result of one question: the ``answer`` is right if its first number is the ``key``."""

    length: int
    depth: float
    key: str
    answer: str

    @property
    def right(self) -> bool:
        """Whether the number matches exactly."""
        found = re.search(r"\d+", self.answer)
        return found is not None and found.group() == self.key


def passkey(tokenizer: PreTrainedTokenizerBase, filler: Tensor, length: int, depth: float, seed: int = 0) -> Passkey:
    """A text of about ``length`` tokens with a hidden key, and its question. Joining filler and key may change the
    length by a few tokens.

    filler: ``[1, S]`` tokens of any text, with S of at least ``length``.
    depth: 0 hides the key at the beginning of the filler, 1 at the end.

    The tokenizer's chat template is used if it has one. Raises `KVPassError` for a depth outside [0, 1], and for a
    length that is too short for a key or longer than the filler.
    """
    if not 0 <= depth <= 1:
        raise KVPassError(f"depth={depth} must be from 0 (the beginning of the text) to 1 (its end).")
    key = str(int(torch.randint(10000, 100000, (), generator=torch.Generator().manual_seed(seed))))
    before, after = around(tokenizer, _TASK, _QUESTION, "The pass key is")
    needle = f"\n\n{_NEEDLE.format(key=key)}\n\n"
    room = length - sum(len(encode(tokenizer, part)) for part in (before, needle))
    if not 0 < room <= filler.shape[1]:
        raise KVPassError(
            f"length={length} leaves {room} tokens for filler, but the filler has only {filler.shape[1]}: pass longer "
            "filler."
        )
    cut = round(depth * room)
    left, right = (tokenizer.decode(part) for part in (filler[0, :cut], filler[0, cut:room]))
    text = encode(tokenizer, f"{before}{left}{needle}{right}\n\n")
    return Passkey(torch.tensor([text]), torch.tensor([encode(tokenizer, after)]), key)


def around(tokenizer: PreTrainedTokenizerBase, task: str, question: str, begun: str) -> tuple[str, str]:
    """What comes before a text, and after it: the ``task``, and the ``question`` with the beginning of the answer,
    ``begun``."""
    if tokenizer.chat_template is None:
        return (tokenizer.bos_token or "") + task, f"{question}\n{begun}"
    messages = [{"role": "user", "content": f"{task}FILLER{question}"}]
    chat = str(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))
    before, _, after = chat.partition("FILLER")
    return before, f"{after}{begun}"


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """The tokens of ``text``, without special ones."""
    ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return ids


class Reading:
    """A text that ``model``, in its current state, packed or not, has read once. Each question follows it over a copy
    of the cache.

    text: ``[1, S]`` tokens.
    """

    @torch.no_grad()
    def __init__(self, model: nn.Module, text: Tensor):
        self.model, self.text, self.cache = model, text.to(device_of(model)), fresh_cache(model)
        model(input_ids=self.text, **filling(model, self.cache, 1))

    @torch.no_grad()
    def answer(self, question: Tensor, most: int, tokenizer: PreTrainedTokenizerBase) -> Tensor:
        """The greedy answer ``[1, A]`` to ``question`` ``[1, Q]``, of up to ``most`` tokens."""
        ids = torch.cat([self.text, question.to(self.text.device)], 1)
        generate: Any = self.model.generate
        out: Tensor = generate(
            ids,
            attention_mask=torch.ones_like(ids),
            **{CACHE: copy.deepcopy(self.cache)},
            do_sample=False,
            max_new_tokens=most,
            pad_token_id=tokenizer.pad_token_id or tokenizer.eos_token_id,
        )
        return out[:, ids.shape[1] :]

    @torch.no_grad()
    def log_probabilities(self, question: Tensor, answer: Tensor) -> Tensor:
        """Those ``[A, V]`` that predict each token of ``answer`` ``[1, A]`` after ``question`` ``[1, Q]``, float64."""
        ids, tokens = torch.cat([x.to(self.text.device) for x in (question, answer)], 1)[:, :-1], answer.shape[1]
        logits = self.model(input_ids=ids, **filling(self.model, copy.deepcopy(self.cache), tokens)).logits
        found: Tensor = logits[0, -tokens:].double().log_softmax(-1)
        return found


def ask(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    text: Tensor,
    questions: Sequence[Tensor],
    most: int = _ANSWER_TOKENS,
) -> list[str]:
    """The greedy answers, of up to ``most`` tokens each, to ``questions`` ``[1, Q]`` about ``text`` ``[1, S]``, which
    is read once (`Reading`)."""
    reading = Reading(model, text)
    return [decoded(tokenizer, reading.answer(question, most, tokenizer)) for question in questions]


def decoded(tokenizer: PreTrainedTokenizerBase, answer: Tensor) -> str:
    """The text of an answer ``[1, A]``, without special tokens."""
    return str(tokenizer.decode(answer[0], skip_special_tokens=True))


def retrieve(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    filler: Tensor,
    schemes: Mapping[str, Scheme],
    lengths: Sequence[int],
    depths: Sequence[float],
    *,
    repeats: int = 1,
    progress: bool = True,
) -> dict[str, list[Retrieval]]:
    """Ask the same questions of each scheme (None: full precision), at every length and depth, ``repeats`` times each.

    Decoding is not compiled, because answers are short. Raises `KVPassError` as `passkey` and `kvpass.apply` do.
    """
    questions = [
        (length, depth, passkey(tokenizer, filler, length, depth, seed))
        for length in lengths
        for depth in depths
        for seed in range(repeats)
    ]

    def answers(asked: tuple[int, float, Passkey], scheme: Scheme) -> list[Retrieval]:
        length, depth, hidden = asked
        return [Retrieval(length, depth, hidden.key, *ask(model, tokenizer, hidden.text, [hidden.question]))]

    return under_each_scheme(model, schemes, questions, answers, progress)


def under_each_scheme(
    model: nn.Module,
    schemes: Mapping[str, Scheme],
    texts: Sequence[Asked],
    answers: Callable[[Asked, Scheme], Sequence[Answered]],
    progress: bool,
) -> dict[str, list[Answered]]:
    """All ``answers`` about ``texts``, while ``model`` has each of ``schemes`` (None: full precision) applied, which is
    their second argument. Decoding is not compiled."""
    results: dict[str, list[Answered]] = {name: [] for name in schemes}
    with bar("", len(schemes) * len(texts), "text", progress) as done:
        for name, scheme in schemes.items():
            done.set_description(name)
            with packed(model, scheme, **({} if scheme is None else {"lowering": "eager"})):
                for text in texts:
                    results[name] += answers(text, scheme)
                    done.update()
    return results
