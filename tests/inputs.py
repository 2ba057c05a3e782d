"""Inputs for transformers models, in a batch of two rows: a text, an image if the class takes images, a text or audio
for an encoder. The format of an image is found by trying the formats that processors produce."""

import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from shrink import VOCABULARY, WIDTH, Architecture, value_of

ROWS, TEXT, PADDING = 2, 40, 6
_FIRST, _LAST = 3, VOCABULARY // 2  # range of ordinary token ids
_GUESSES = (4, 16, 1, 17, 64)  # image tokens per row, if no error names the number
_IMAGE_TOKENS_MISSED = re.compile("'(bool|NoneType)' object has no attribute|image tokens|mm_token_type_ids")
_IMAGE_TOKENS = ("image_token_id", "image_token_index", "media_placeholder_token_id", "image_patch_id")


@dataclass(frozen=True)
class Prompt:
    """Arguments of a first call.

    ids: the decoder's input, ``[ROWS, S]``.
    first: other arguments of the first call.
    every: arguments of all calls, for the encoder.
    padding: padding tokens on the left of row 0.
    """

    ids: Tensor
    first: dict[str, Any] = field(default_factory=dict)
    every: dict[str, Any] = field(default_factory=dict)
    padding: int = 0

    @property
    def mask(self) -> Tensor:
        """The padding mask of `ids`, int64."""
        mask = torch.ones_like(self.ids)
        mask[0, : self.padding] = 0
        return mask

    def padded(self) -> "Prompt":
        """The same prompt with padding in row 0: on the left for the decoder, on the right for an encoder."""
        if self.every:
            ids = next(iter(self.every.values()))
            mask = torch.ones_like(ids)
            mask[0, -PADDING:] = 0
            return Prompt(self.ids, self.first, self.every | dict(attention_mask=mask))
        ids, types = self.ids.clone(), {name: x for name, x in self.first.items() if name.endswith("token_type_ids")}
        shorter = torch.cat([torch.zeros(PADDING, dtype=torch.long), ids[0, :-PADDING]])
        ids[0] = shorter
        for name, x in types.items():
            types[name] = x.clone()
            types[name][0] = torch.cat([torch.zeros(PADDING, dtype=torch.long), x[0, :-PADDING]])
        return Prompt(ids, self.first | types, padding=PADDING)


def random_tokens(length: int, seed: int = 0) -> Tensor:
    """``[ROWS, length]`` random ids of ordinary tokens."""
    return torch.randint(_FIRST, _LAST, (ROWS, length), generator=torch.Generator().manual_seed(seed))


def text(model: PreTrainedModel, architecture: Architecture) -> Prompt | None:
    """A text, and the input of an encoder; None if only `with_images` can find one."""
    if not model.config.is_encoder_decoder:
        return Prompt(random_tokens(TEXT))
    name = model.main_input_name
    if name == "input_ids":
        return Prompt(random_tokens(TEXT), every=dict(input_ids=random_tokens(TEXT - 9, seed=1)))
    if architecture.group != "speech":
        return None
    for sounds in _sounds(model.config):
        prompt = Prompt(random_tokens(TEXT), every={name: sounds})
        if works(model, prompt) is None:
            return prompt
    return None


def with_types(model: PreTrainedModel, prompt: Prompt | None) -> Prompt | None:
    """A text whose first half has another token type, as for a prefix, an image, or a first sentence."""
    if prompt is None or "token_type_ids" not in inspect.signature(model.forward).parameters:
        return None
    types = torch.zeros_like(prompt.ids)
    types[:, : TEXT // 2] = 1
    return Prompt(prompt.ids, prompt.first | dict(token_type_ids=types), prompt.every)


def with_images(model: PreTrainedModel) -> Prompt | None:
    """A text after an image in each row that affects the logits; None if none was found."""
    parameters = inspect.signature(model.forward).parameters
    encoder = model.config.is_encoder_decoder
    for candidate in _images(model.config, seed=0):
        given = {name: value for name, value in candidate.items() if name in parameters}
        if not any(name in given for name in ("pixel_values", "flattened_patches")):
            continue
        counts, tried = [0, *_GUESSES], set()
        while counts:
            count = counts.pop(0)
            tried.add(count)
            prompt = _behind(model, given, count, encoder)
            error = works(model, prompt)
            if error is None and _matters(model, prompt):
                return prompt
            asked = [n for n in _asked_for(error) if 0 < n <= 1024]
            if error is None and count:
                break
            if error is not None and not asked and not _IMAGE_TOKENS_MISSED.search(str(error)):
                break  # their number is not the problem
            counts = [n for n in [*asked, *counts] if n not in tried]
    return None


@torch.no_grad()
def works(model: PreTrainedModel, prompt: Prompt) -> Exception | None:
    """The error that calling the model raises; None if it works."""
    try:
        call(model, prompt)
    except Exception as error:
        return error
    return None


def call(model: PreTrainedModel, prompt: Prompt, **others: Any) -> Any:
    """Call the model with the whole prompt. A mask is passed if it hides something."""
    name = "decoder_input_ids" if model.config.is_encoder_decoder else "input_ids"
    mask = dict(attention_mask=prompt.mask) if prompt.padding else {}
    return model(**{name: prompt.ids}, **prompt.every, **prompt.first, **mask, **others)


def _behind(model: PreTrainedModel, images: dict[str, Any], count: int, encoder: bool) -> Prompt:
    """A prompt with ``count`` image tokens per row before its text."""
    token = next((t for name in _IMAGE_TOKENS if isinstance(t := value_of(model.config, name), int)), 0)
    ids = torch.cat([torch.full((ROWS, count), token), random_tokens(TEXT)], 1)
    parameters = inspect.signature(model.forward).parameters
    if encoder:
        if "input_ids" in parameters:
            return Prompt(random_tokens(TEXT), every=dict(input_ids=ids, **images))
        return Prompt(random_tokens(TEXT), every=images)
    types = {name: (ids == token).long() for name in ("token_type_ids", "mm_token_type_ids") if name in parameters}
    return Prompt(ids, images | types if count else images)


@torch.no_grad()
def _matters(model: PreTrainedModel, prompt: Prompt) -> bool:
    """Whether other pixels give other logits."""
    other = {n: x.flip(0) if n in ("pixel_values", "flattened_patches") else x for n, x in prompt.first.items()}
    encoded = {n: x.flip(0) if n in ("pixel_values", "flattened_patches") else x for n, x in prompt.every.items()}
    mine = call(model, prompt).logits
    theirs = call(model, Prompt(prompt.ids, other, encoded)).logits
    return bool(((mine - theirs)[:, -1].abs().amax() > 1e-4 * mine.std()) & mine.isfinite().all())


def _asked_for(error: Exception | None) -> list[int]:
    """Numbers of image tokens per row that an error may ask for."""
    found = re.search(r"features:? *(?:torch.Size\(\[)?(\d+)", str(error))
    if found is None:
        return []
    features = int(found[1])
    return [features // part for part in (ROWS, ROWS * WIDTH, 1) if features % part == 0]


def _vision(config: PretrainedConfig) -> PretrainedConfig:
    """The config that defines the size of an image."""
    parts = [value_of(config, name) for name in getattr(config, "sub_configs", {})]
    parts += [value_of(part, name) for part in parts for name in getattr(part, "sub_configs", None) or {}]
    return next((part for part in parts if value_of(part, "patch_size") or value_of(part, "image_size")), config)


def _images(config: PretrainedConfig, seed: int) -> Iterator[dict[str, Any]]:
    """One image per row, in the formats of processors: whole, in tiles, in patches; each with its other arguments."""
    vision, generator = _vision(config), torch.Generator().manual_seed(seed)

    def number(name: str, otherwise: int) -> int:
        value = value_of(vision, name)
        value = value[0] if isinstance(value, list | tuple) else value
        return value if isinstance(value, int) and value else otherwise

    side, patch, channels = number("image_size", 32), number("patch_size", 8), number("num_channels", 3)
    merge, page_tables = number("spatial_merge_size", 1), number("temporal_patch_size", 1)

    def pixels(*shape: int) -> Tensor:
        return torch.randn(ROWS, *shape, generator=generator)

    ones = torch.ones
    sizes = dict(
        image_sizes=torch.tensor([[side, side]] * ROWS), target_sizes=torch.tensor([[side // patch] * 2] * ROWS),
        pixel_mask=ones(ROWS, side, side, dtype=torch.long),
    )  # fmt: skip
    words = dict(qformer_input_ids=random_tokens(5))
    yield dict(pixel_values=pixels(channels, side, side), **words)
    yield dict(pixel_values=pixels(channels, side, side), **sizes)
    for tiles in (1, 2, 3, 5):
        yield dict(
            pixel_values=pixels(tiles, channels, side, side), **sizes,
            pixel_attention_mask=ones(ROWS, tiles, side, side, dtype=torch.long),
        )  # fmt: skip
    grid = max(2 * merge, side // patch // merge * merge)
    patches = grid * grid
    thw = torch.tensor([[1, grid, grid]] * ROWS)
    flat = channels * patch * patch
    for width in dict.fromkeys((flat * page_tables, flat, flat * 2)):
        yield dict(pixel_values=pixels(patches, width).flatten(0, 1), image_grid_thw=thw, grid_thws=thw)
    where = torch.cartesian_prod(torch.arange(grid), torch.arange(grid)).expand(ROWS, -1, -1)
    yield dict(
        pixel_values=pixels(patches, flat), image_position_ids=where, spatial_shapes=thw[:, 1:],
        pixel_attention_mask=ones(ROWS, patches, dtype=torch.long),
    )  # fmt: skip
    yield dict(
        pixel_values=pixels(1, number("max_num_tiles", 1), channels, side, side),
        aspect_ratio_ids=ones(ROWS, 1, dtype=torch.long),
        aspect_ratio_mask=ones(ROWS, 1, number("max_num_tiles", 1), dtype=torch.long),
        cross_attention_mask=ones(ROWS, TEXT, 1, number("max_num_tiles", 1), dtype=torch.long),
    )  # fmt: skip
    width = number("patch_embed_hidden_size", flat)
    yield dict(flattened_patches=pixels(16, 2 + width).abs(), attention_mask=ones(ROWS, 16))


def _sounds(config: PretrainedConfig) -> Iterator[Tensor]:
    """Possible inputs of a speech encoder: features by frame or by bin, or samples."""
    generator, bins = torch.Generator().manual_seed(0), []
    for part in (config, *(value_of(config, name) for name in getattr(config, "sub_configs", {}))):
        for name in ("num_mel_bins", "input_feat_per_channel", "feature_projection_input_dim"):
            bins += [n for n in [value_of(part, name)] if isinstance(n, int)]
    for features in dict.fromkeys([*bins, 80]):
        for page_tables in (2 * 512, 96):
            yield torch.randn(ROWS, features, page_tables, generator=generator)
            yield torch.randn(ROWS, page_tables, features, generator=generator)
    yield torch.randn(ROWS, 8000, generator=generator)
