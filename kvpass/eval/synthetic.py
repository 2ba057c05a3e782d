"""Tasks after RULER (arXiv 2404.06654), generated: needles, variable tracking and common words, at a chosen length.

As in `retrieval`, the text is read first, and a question follows in a call of its own, so that it and the answer attend
to the text as it is stored. A text that hides several keys is read once and asked for each of them. An answer is scored
by the share of the wanted strings that it contains.
"""

import random
import re
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from ..errors import KVPassError
from ..fields import shown
from .quality import divergences
from .retrieval import Reading, around, decoded, encode, under_each_scheme
from .size import Scheme
from .texts import read


class _Asked(NamedTuple):
    """question, begun: see `around`; wanted: the strings of a right answer."""

    question: str
    begun: str
    wanted: tuple[str, ...]


class _Parts(NamedTuple):
    """task: see `around`; asked: questions about one text; most: tokens of an answer.

    needles: sentences to hide in filler, in this order; None if ``listed`` makes the text.
    listed: a text of n entries.
    """

    task: str
    asked: tuple[_Asked, ...]
    most: int
    needles: tuple[str, ...] | None = None
    listed: Callable[[int], str] | None = None


@dataclass(frozen=True, eq=False)
class Question:
    """tokens: ``[1, Q]``; wanted: the strings of a right answer."""

    tokens: Tensor
    wanted: tuple[str, ...]


@dataclass(frozen=True)
class Document:
    """text: ``[1, S]`` tokens; questions: about this text; most: how many tokens an answer takes."""

    text: Tensor
    questions: tuple[Question, ...]
    most: int


@dataclass(frozen=True)
class Answer:
    """The answer to one question.

    kl: mean KL(full || scheme) of the next token, in nats, within the answer that full precision gives; None if full
        precision was not asked before. It shows differences that few questions do not, also where full precision fails.
    """

    task: str
    length: int
    wanted: tuple[str, ...]
    answer: str
    kl: float | None = None

    @property
    def score(self) -> float:
        """The share of the ``wanted`` strings that the answer contains, as whole words: from 0 to 1."""
        words = set(re.findall(r"\w+", self.answer))
        return sum(wanted in words for wanted in self.wanted) / len(self.wanted)


def _words() -> list[str]:
    """Distinct words of the built-in prose, in alphabetical order."""
    return sorted(set(re.findall(r"\b[a-z]{4,8}\b", read("prose"))))


def _needles(keys: int, values: int) -> Callable[[random.Random], _Parts]:
    """``keys`` keys with ``values`` numbers each; a question asks for all numbers of one key."""

    def made(draw: random.Random) -> _Parts:
        names = draw.sample(_words(), keys)
        numbers = {name: tuple(str(draw.randrange(1_000_000, 10_000_000)) for _ in range(values)) for name in names}
        hidden = [
            f"One of the special magic numbers for {name} is: {number}." for name in names for number in numbers[name]
        ]
        draw.shuffle(hidden)
        asked = [
            _Asked(
                f"What are all the special magic numbers for {name} mentioned in the text?",
                f"The special magic numbers for {name} mentioned in the text are",
                numbers[name],
            )
            for name in names
        ]
        task = "Some special magic numbers are hidden in the following text. Memorize them. I will ask for them.\n\n"
        return _Parts(task, tuple(asked), 12 + 12 * values, tuple(hidden))

    return made


def _variables(hops: int) -> Callable[[random.Random], _Parts]:
    """A chain of assignments; the question asks for all variables with its value."""

    def made(draw: random.Random) -> _Parts:
        names: list[str] = []
        while len(names) <= hops:
            name = "".join(draw.choices(string.ascii_uppercase, k=5))
            names += [name] if name not in names else []
        value = str(draw.randrange(10_000, 100_000))
        first = f"VAR {names[0]} = {value}."
        chain = [f"VAR {name} = VAR {before}." for before, name in pairwise(names)]
        what = f"Find all variables that are assigned the value {value}, directly or through others."
        begun = f"{hops + 1} variables are assigned the value {value}, they are:"
        task = "Memorize and track the chain of variable assignments hidden in the following text.\n\n"
        return _Parts(task, (_Asked(what, begun, tuple(names)),), 8 * (hops + 2), (first, *chain))

    return made


def _common(count: int, often: int, seldom: int) -> Callable[[random.Random], _Parts]:
    """A list in which ``count`` words occur ``often`` times as often as ``seldom`` says the others do."""

    def made(draw: random.Random) -> _Parts:
        pool = draw.sample(_words(), len(_words()))
        common, others = pool[:count], pool[count:]

        def listed(entries: int) -> str:
            distinct = max(1, (entries - count * often) // seldom)
            words = common * often + (others * (1 + distinct // len(others)))[:distinct] * seldom
            random.Random(0).shuffle(words)
            return "\n".join(f"{number}. {word}" for number, word in enumerate(words, 1))

        task = "Below is a numbered list of words, some of which appear more often than others. Memorize these.\n\n"
        what, begun = f"What are the {count} most common words in the list?", f"The {count} most common words are:"
        return _Parts(task, (_Asked(what, begun, tuple(common)),), 8 * count, listed=listed)

    return made


TASKS: dict[str, Callable[[random.Random], _Parts]] = {
    "niah-single": _needles(1, 1),
    "niah-multikey": _needles(4, 1),
    "niah-multivalue": _needles(1, 4),
    "variables": _variables(4),
    "common-words": _common(10, 15, 2),
}
"""Name -> what makes the parts of a document."""


def document(tokenizer: PreTrainedTokenizerBase, filler: Tensor, task: str, length: int, seed: int = 0) -> Document:
    """A text of about ``length`` tokens for ``task``, with its questions.

    filler: ``[1, S]`` tokens of any text, with S of at least ``length``.

    Raises `KVPassError` for an unknown task, for a length without room, and for filler that is too short.
    """
    if task not in TASKS:
        raise KVPassError(f"Unknown task {shown(task)}: choose from {', '.join(TASKS)}.")
    draw = random.Random(f"{task} {seed}")
    parts = TASKS[task](draw)
    sides = [around(tokenizer, parts.task, asked.question, asked.begun) for asked in parts.asked]
    before = sides[0][0]
    room = length - len(encode(tokenizer, before))
    if parts.listed is not None:
        body = _of_length(tokenizer, parts.listed, room)
    else:
        needles = parts.needles or ()
        room -= sum(len(encode(tokenizer, f"\n\n{needle}\n\n")) for needle in needles)
        if not 0 < room <= filler.shape[1]:
            raise KVPassError(
                f"length={length} leaves {room} tokens for filler, of which there are {filler.shape[1]}: use another "
                "length, or pass longer filler."
            )
        cuts = sorted(draw.randrange(room + 1) for _ in needles)
        pieces = [str(tokenizer.decode(filler[0, a:b])) for a, b in zip([0, *cuts], [*cuts, room], strict=True)]
        body = pieces[0] + "".join(f"\n\n{n}\n\n{piece}" for n, piece in zip(needles, pieces[1:], strict=True))
    questions = [
        Question(torch.tensor([encode(tokenizer, after)]), asked.wanted)
        for (_, after), asked in zip(sides, parts.asked, strict=True)
    ]
    return Document(torch.tensor([encode(tokenizer, f"{before}{body}\n\n")]), tuple(questions), parts.most)


def _of_length(tokenizer: PreTrainedTokenizerBase, listed: Callable[[int], str], room: int) -> str:
    """The longest list of at most ``room`` tokens."""
    low, high = 1, max(2, room)
    if len(encode(tokenizer, listed(low))) > room:
        raise KVPassError(f"A list of words needs more than {room} tokens: use a greater length.")
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if len(encode(tokenizer, listed(middle))) <= room else (low, middle)
    return listed(low)


def run_ruler(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    filler: Tensor,
    schemes: Mapping[str, Scheme],
    tasks: Sequence[str],
    lengths: Sequence[int],
    *,
    repeats: int = 1,
    progress: bool = True,
) -> dict[str, list[Answer]]:
    """Ask the same questions of each scheme (None: full precision), about ``repeats`` texts for each task and length.

    Decoding is not compiled, because answers are short. Raises `KVPassError` as `document` and `kvpass.apply` do.
    """
    documents = [
        (task, length, document(tokenizer, filler, task, length, seed))
        for task in tasks
        for length in lengths
        for seed in range(repeats)
    ]

    exact: dict[Question, tuple[Tensor, Tensor]] = {}  # answers in full precision, and their log-probabilities

    def answers(one: tuple[str, int, Document], scheme: Scheme) -> list[Answer]:
        task, length, read = one
        reading, found = Reading(model, read.text), []
        for question in read.questions:
            answer, kl = reading.answer(question.tokens, read.most, tokenizer), None
            if scheme is None:
                exact[question], kl = (answer, reading.log_probabilities(question.tokens, answer).float()), 0.0
            elif question in exact:
                of_full, expected = exact[question]
                kl = float(
                    divergences(expected, reading.log_probabilities(question.tokens, of_full)).mean().clamp_min(0)
                )
            found.append(Answer(task, length, question.wanted, decoded(tokenizer, answer), kl))
        return found

    return under_each_scheme(model, schemes, documents, answers, progress)
