"""The scheme that a vLLM user asks for, and whether it can be served there. This module does not import vLLM."""

import json
import os
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import lcm
from typing import Any, NamedTuple

import torch

from .. import schemes
from ..codec.allocation import Allocation
from ..codec.calibrated_layer import CalibratedLayer
from ..codec.spec import CodecSpec
from ..codec.tensors import of_model
from ..errors import KVPassError
from ..fields import check_types, shown
from ..lowering.table import AUTO
from ..paged.block_layout import BlockLayout
from ..paged.model_layout import ModelLayout
from ..paged.paged_attention import lowerings_of_blocks
from ..prefix_store.chunks import LayerShape
from ..schemes import CalibratedWaterfillConfig, LayerGeometry, LayerPlan, SchemeConfig
from .calibrated_scheme import CALIBRATE, CalibratedScheme

VARIABLE = "KVPASS_SCHEME"
"""The environment variable that sets the scheme: a name, or JSON such as {"scheme": "kivi", "bits": 4}."""
KEY = "kvpass"
"""The key of ``additional_config`` that sets the scheme."""
OLDEST, NEWEST = (0, 32), (0, 32)
"""The tested releases of vLLM, from and to."""


_TYPICAL, _IN_FLIGHT = 4096, 512
_LEAST, _LARGEST = 64, 512  # tokens per block: small enough to match prefixes, large enough for short block tables


def check_version(version: str) -> None:
    """Raise `KVPassError` for an untested vLLM: its backend interface is private, and any release may change it."""
    release = tuple(map(int, re.findall(r"\d+", version)[:2]))
    if not OLDEST <= release <= NEWEST:
        tested = " to ".join(".".join(map(str, bound)) for bound in dict.fromkeys((OLDEST, NEWEST)))
        raise KVPassError(
            f"kvpass is tested with vLLM {tested}, but this is {version}: install a tested version. `make test-vllm` "
            "in the kvpass repository shows what this version changed."
        )


@dataclass(frozen=True)
class Options:
    """What a user sets under `KEY`.

    scheme: with its fields, or a calibration.
    lowering: the kernels over blocks, as in `kvpass.apply`: "auto", or a name for those ops that have it.
    untested_platform: whether to start where kvpass was never run, such as GPUs.
    """

    scheme: SchemeConfig | CalibratedScheme
    lowering: str = AUTO
    untested_platform: bool = False

    def __post_init__(self) -> None:
        check_types(self)
        if self.lowering != AUTO and self.lowering not in (known := lowerings_of_blocks()):
            raise KVPassError(f"lowering={self.lowering!r} must be 'auto' or one of {known}.")


def options_asked(additional: Any, environment: Mapping[str, str] = os.environ) -> Options | None:
    """The options that ``additional_config`` or the environment sets, or None. Raises `KVPassError` for anything but a
    scheme, or the folder of a calibration, and options."""
    found = additional.get(KEY) if isinstance(additional, Mapping) else None
    if found is None:
        text = environment.get(VARIABLE, "").strip()
        found = _parsed(text) if text else None
    if found is None:
        return None
    if isinstance(found, str):
        found = {"scheme": found}
    if not isinstance(found, dict) or "scheme" not in found:
        raise KVPassError(f'{KEY} takes a scheme and its fields, {{"scheme": "kivi", "bits": 4}}, not {shown(found)}.')
    more = {key: found[key] for key in ("lowering", "untested_platform") if key in found}
    return Options(_scheme({key: value for key, value in found.items() if key not in more}), **more)


def _scheme(found: dict[str, Any]) -> SchemeConfig | CalibratedScheme:
    if isinstance(found["scheme"], str) and os.path.isdir(os.path.expanduser(found["scheme"])):
        if others := sorted(set(found) - {"scheme"}):
            raise KVPassError(f"{found['scheme']} is a calibration, whose fields are fixed: leave out {others}.")
        return CalibratedScheme.of(found["scheme"])
    name, fields = found["scheme"], {key: value for key, value in found.items() if key not in ("scheme", "version")}
    return schemes.get(schemes.get(name) if isinstance(name, str) else found, **fields)


def _parsed(text: str) -> Any:
    if not text.startswith("{"):
        return text
    try:
        return json.loads(text)
    except ValueError as error:
        raise KVPassError(f"{VARIABLE} holds invalid JSON: {error}.") from error


_PREDICTED = "Storing a layer would require reading another one, but vLLM gives each layer only its own blocks."
_SERVED = "Use kivi-sinks or higgs-sinks."


def refusal(spec: CodecSpec) -> str | None:
    """Why storage by ``spec`` cannot be served, and what can be served instead; None if it can."""
    quantizer, transform, retention = spec.quantizer, spec.transform, spec.retention
    if retention.evicts or retention.keep != "recent":
        return (
            "Its policy drops or thins out tokens by more than their age, but vLLM frees blocks by age only. Use a "
            "scheme without a policy, such as kivi-sinks."
        )
    if quantizer.adaptive is not None:
        return f"Per-token bit widths make pages vary in size, but blocks have a fixed size. {_SERVED}"
    if transform.predictor or spec.own_codes != 1:
        return f"What is stored depends on another layer. {_PREDICTED} {_SERVED}"
    if quantizer.needs_queries:
        return f"The codec is fitted to a prompt's queries, but vLLM passes prompts in chunks. {_SERVED}"
    if of_model(spec):
        return f"Bit widths come from a calibration. {_SERVED}"
    if isinstance(spec.codec, Allocation):
        return f"A basis per request takes more memory than the pages of a block. {_SERVED}"
    if not spec.codec.dequantizes_any_bytes:
        return (
            f"Codec {spec.codec.name!r} cannot decode arbitrary bytes (its pages hold indices, or it does not declare "
            f"`Codec.dequantizes_any_bytes`), but blocks are also read where nothing is stored yet. {_SERVED}"
        )
    if transform.keeps_tables:
        return "vLLM backends receive keys after rotary embedding. Use rope='post'."
    return None


class SlidingBlock(NamedTuple):
    """A block of a model's sliding-window layers: its tokens, and its bytes per layer."""

    tokens: int
    nbytes: int


class ServedBlocks(ABC):
    """How an engine divides its memory for a scheme: blocks of pages, and blocks of the exact tokens."""

    @property
    @abstractmethod
    def page_size(self) -> int:
        """Tokens per page; block sizes are multiples of it."""

    @property
    @abstractmethod
    def window(self) -> int:
        """The most tokens that are exact in a step: those before the step, and its first one."""

    @abstractmethod
    def layout(self, block_size: int) -> BlockLayout | ModelLayout:
        """The layout of blocks of ``block_size`` tokens. Raises `KVPassError` if pages do not fit them."""

    @abstractmethod
    def block_bytes(self, block_size: int) -> int:
        """Bytes of a block of pages. Raises `KVPassError` if pages do not fit it."""

    @property
    @abstractmethod
    def exact_bytes(self) -> int:
        """Bytes of an exact token in a block of the window."""

    def block_size(self, beside: SlidingBlock | None = None) -> int:
        """Tokens per block that take the least memory for requests of some thousand tokens with some hundred in
        flight.

        beside: the blocks of the model's sliding-window layers. vLLM pads all blocks of an engine to the largest one,
        so a block of pages holds as many tokens as fit into one of those.
        """
        if beside is not None:
            step = lcm(self.page_size, beside.tokens)
            fits = [size for size in range(step, max(_LARGEST, step) + 1, step) if self._nbytes(size) <= beside.nbytes]
            if fits:
                return fits[-1]

        def taken(size: int) -> int:
            if (nbytes := self._nbytes(size)) == sys.maxsize:
                return sys.maxsize
            in_flight = -(-(self.window + _IN_FLIGHT) // self.window_block(size)) + 1
            return (-(-_TYPICAL // size) + in_flight) * nbytes

        multiples = range(self.page_size, max(_LARGEST, self.page_size) + 1, self.page_size)
        return min((size for size in multiples if size >= min(_LEAST, multiples[-1])), key=taken)

    def _nbytes(self, block_size: int) -> int:
        """`block_bytes`; more than any block has if pages do not fit it."""
        try:
            return self.block_bytes(block_size)
        except KVPassError:
            return sys.maxsize

    def window_block(self, block_size: int, beside: SlidingBlock | None = None) -> int:
        """Tokens per window block: the block size divided by a whole number, so that a window block takes no more bytes
        than a block of pages, or than one of ``beside``. Otherwise vLLM would enlarge blocks until sizes agree, and
        find no prefixes in them."""
        room = max(self._nbytes(block_size), 0 if beside is None else beside.nbytes)
        fits = [size for size in range(1, block_size + 1) if block_size % size == 0 and size * self.exact_bytes <= room]
        return max(fits)


@dataclass(frozen=True)
class Served(ServedBlocks):
    """A scheme as vLLM serves it: one plan for all layers of a model.

    Raises `KVPassError`, which names an alternative, if the scheme cannot be served or does not fit the heads.
    """

    scheme: SchemeConfig
    layers: int
    heads: int
    head_dim: int
    dtype: torch.dtype

    def __post_init__(self) -> None:
        if isinstance(self.scheme, CalibratedWaterfillConfig):
            raise KVPassError(f"{self.name!r} must be calibrated on the model. {CALIBRATE} {_SERVED}")
        if self.scheme.needs_calibration:
            raise KVPassError(
                f"{self.name!r} must be calibrated on a model, and vLLM's blocks hold no calibration. {_SERVED}"
            )
        plans = {index: self._plan_of(index) for index in range(self.layers)}
        for index, plan in plans.items():
            for name, spec in (("keys", plan.key), ("values", plan.value)):
                if reason := refusal(spec):
                    raise KVPassError(f"vLLM cannot serve the {name} of {self.name!r}. {reason}")
            if (plan.key_source, plan.value_source) != (None, None):
                raise KVPassError(
                    f"Layer {index} of {self.name!r} reads the quantized values of another layer. {_PREDICTED} "
                    f"{_SERVED}"
                )
            if plan.key.page_size != plan.value.page_size:
                raise KVPassError(
                    f"{self.name!r} stores pages of {plan.key.page_size} keys and of {plan.value.page_size} values, "
                    f"but a block holds as many of both. {_SERVED}"
                )
            skipped = getattr(self.scheme, "skip_layers", ())
            if plan != plans[0]:
                raise KVPassError(
                    f"{self.name!r} stores layer {index} differently from layer 0, but all layers share one block "
                    f"table. {'Leave out skip_layers.' if any(skipped) else _SERVED}"
                )

    @property
    def name(self) -> str:
        """The name that a user asks for the scheme by: of a preset, if there is one."""
        found = schemes.named(self.scheme)
        return found if isinstance(found, str) else self.scheme.name

    def _plan_of(self, index: int) -> LayerPlan:
        previous = index - 1 if index else None
        return self.scheme.plan_of(
            LayerGeometry(index, self.layers, self.heads, self.head_dim, self.dtype, torch.device("cpu"), previous)
        )

    @cached_property
    def plan(self) -> LayerPlan:
        return self._plan_of(0)

    @property
    def page_size(self) -> int:
        return self.plan.key.page_size

    @property
    def window(self) -> int:
        return max(spec.retention.window for spec in (self.plan.key, self.plan.value))

    def layout(self, block_size: int) -> BlockLayout:
        return BlockLayout(self.plan.key, self.plan.value, self.head_dim, self.dtype, block_size)

    def block_bytes(self, block_size: int) -> int:
        return self.layout(block_size).bytes_per_token * block_size * self.heads

    @property
    def exact_bytes(self) -> int:
        return 2 * self.heads * self.head_dim * self.dtype.itemsize

    def check_gain(self, block_size: int, beside: SlidingBlock, longest: int, in_flight: int) -> None:
        """Raise `KVPassError` unless requests of ``longest`` tokens, with ``in_flight`` of them in a step, take fewer
        blocks than without kvpass. All blocks of an engine have the same bytes."""
        window = self.window_block(block_size, beside)
        packed = -(-longest // block_size) + -(-(self.window - 1 + min(in_flight, longest)) // window) + 1
        full = -(-longest // beside.tokens)
        if packed >= full:
            raise KVPassError(
                f"Beside this model's sliding-window layers, {self.name!r} would take {packed} blocks for a request of "
                f"{longest} tokens, and vLLM takes {full}. Lower --max-num-batched-tokens (now {in_flight}), raise "
                "--max-model-len, serve without kvpass, or set --block-size to serve it all the same."
            )


@dataclass(frozen=True)
class ServedCalibration(ServedBlocks):
    """A calibrated scheme as vLLM serves it: all layers share a block, because their pages differ in size.

    Raises `KVPassError` if the calibration does not fit the heads of a process, of which there are ``ranks``.
    """

    scheme: CalibratedScheme
    heads: int
    head_dim: int
    dtype: torch.dtype
    ranks: int = 1
    rank: int = 0

    def __post_init__(self) -> None:
        shape = LayerShape(self.heads, self.head_dim, self.dtype)
        self.scheme.check_layers(dict.fromkeys(self.layers, shape), self.layers)

    @cached_property
    def layers(self) -> dict[int, CalibratedLayer]:
        """The calibrated tensors of each layer, for the heads of this process."""
        return self.scheme.layers(self.ranks, self.rank, self.dtype)

    @cached_property
    def _pages(self) -> list[tuple[tuple[int, int], ...]]:
        """Bytes per page of keys and of values of each layer, for each process."""
        found = []
        for rank in range(self.ranks):
            layers = self.layers if rank == self.rank else self.scheme.layers(self.ranks, rank, self.dtype)
            found.append(tuple(layer.page_bytes for layer in layers.values()))
        return found

    @property
    def plan(self) -> LayerPlan:
        layer = next(iter(self.layers.values()))
        return LayerPlan(layer.key_spec, layer.value_spec)

    @property
    def page_size(self) -> int:
        return self.plan.key.page_size

    @property
    def window(self) -> int:
        return self.plan.key.retention.window

    def _layout(self, block_size: int, rank: int) -> ModelLayout:
        retention = self.plan.key.retention
        return ModelLayout(self._pages[rank], retention, self.heads, self.head_dim, self.dtype, block_size)

    def layout(self, block_size: int) -> ModelLayout:
        return self._layout(block_size, self.rank)

    def bytes_per_token(self, block_size: int) -> int:
        """Bytes of a block divided by its tokens. vLLM has blocks of the same size in all processes, so this is the
        most of any."""
        return max(-(-self._layout(block_size, rank).nbytes // block_size) for rank in range(self.ranks))

    def block_bytes(self, block_size: int) -> int:
        return self.bytes_per_token(block_size) * block_size

    @property
    def exact_bytes(self) -> int:
        return 2 * len(self.layers) * self.heads * self.head_dim * self.dtype.itemsize
