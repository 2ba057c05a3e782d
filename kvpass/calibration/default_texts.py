"""What a calibration reads unless it is given token ids: texts that come with kvpass and with Python."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ..errors import KVPassError
from ..eval import texts
from ..schemes import CalibratedWaterfillConfig, SchemeConfig, WaterfillConfig


@dataclass(frozen=True)
class Reading:
    """How texts are cut into sequences.

    sources: names of texts, as `kvpass.eval.texts.read` takes them.
    tokens: number of tokens of each text.
    length: tokens per sequence.
    skip: how many tokens at the start of each text are left out.
    spread: take sequences from all parts of a text instead of consecutive ones.
    """

    sources: Sequence[str]
    tokens: int
    length: int
    skip: int
    spread: bool

    def __post_init__(self) -> None:
        if self.tokens < self.length:
            raise KVPassError(
                f"{self.tokens} tokens are less than one sequence of {self.length}: ask for more, or for shorter ones."
            )

    def sequences(self, tokenizer: PreTrainedTokenizerBase) -> list[Tensor]:
        """The sequences of all texts, ``[length]`` int64 each. Raises `KVPassError` if a text is too short."""
        return [ids for source in self.sources for ids in self.of_text(tokenizer, source)]

    def of_text(self, tokenizer: PreTrainedTokenizerBase, source: str) -> list[Tensor]:
        """The sequences of one text."""
        count = self.tokens // self.length
        if not self.spread:
            ids = texts.tokens(tokenizer, source, self.skip + count * self.length)[0, self.skip :]
            return list(ids.view(count, self.length))
        ids = torch.tensor(tokenizer(texts.read(source), verbose=False)["input_ids"])[self.skip :]
        if len(ids) < count * self.length:
            raise KVPassError(
                f"The text {source!r} has {len(ids)} tokens, but {count * self.length} are needed: ask for fewer."
            )
        starts = [i * (len(ids) - self.length) // max(1, count - 1) for i in range(count)]
        return [ids[start : start + self.length] for start in starts]


def reading_for(scheme: SchemeConfig) -> Reading:
    """What calibrating ``scheme`` reads: `waterfill`, which also runs backward passes, 12,288 tokens of four kinds of
    text; other schemes 24,576 tokens of the texts that `kvpass eval` scores, behind those that it scores."""
    if isinstance(scheme, (CalibratedWaterfillConfig, WaterfillConfig)):
        return Reading(texts.to_calibrate(), tokens=3072, length=768, skip=0, spread=True)
    return Reading(texts.available(), tokens=12288, length=1024, skip=4096, spread=False)
