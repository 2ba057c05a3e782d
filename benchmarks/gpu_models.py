"""Stages of `gpu.py` that run whole models with random weights, by default in the shape of Llama-3-8B."""

import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache

import kvpass
from kvpass.cache.state import KVState
from kvpass.eval.speed import sharing_weights
from kvpass.schemes import LayerGeometry, get

from decode_e2e import fill, quantized, requantized

EIGHT_BILLION = (32, 4096, 32, 8)
"""Layers, hidden size, query and KV heads."""
_CHECKED = ("kivi", "squat", "higgs", "kivi-pre", "waterfill", "waterfill-heads")
_SMALL = (4, 512, 8, 2)
_CLOSE = 1e-2  # logits of a small model in float32
_WARM = 40  # steps before those that are measured: more than a page has tokens
_ROOM = _WARM + 8  # further tokens that a static cache has room for
_LONGEST = 8  # kernels listed in a profile


def llama(device: torch.device, dtype: torch.dtype, layers: int, hidden: int, heads: int, kv_heads: int, **config):
    """A Llama with random weights, created on the device."""
    config = LlamaConfig(
        hidden_size=hidden, intermediate_size=7 * hidden // 2, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv_heads, max_position_embeddings=1 << 18, pad_token_id=0, eos_token_id=None, **config,
    )  # fmt: skip
    torch.manual_seed(0)
    with device:
        return LlamaForCausalLM._from_config(config, dtype=dtype).eval()


def _failed(error: Exception) -> dict:
    return dict(error=f"{type(error).__name__}: {error}"[:500], good=False)


def generates(
    device: torch.device, schemes=_CHECKED, prompt: int = 300, new: int = 150, shape: tuple[int, ...] = _SMALL,
    lowering: str = "auto",
) -> Iterator[dict]:  # fmt: skip
    """For each way to call ``generate``, the difference of float32 logits from eager execution, up to the first token
    that differs, if there is one."""
    model = llama(device, torch.float32, *shape, vocab_size=256)
    ids = torch.randint(1, 256, (3, prompt), device=device)
    padding = (torch.arange(prompt, device=device) >= torch.tensor([[0], [prompt // 3], [1]], device=device)).long()
    calls = {
        "one": dict(input_ids=ids[:1]),
        "padded": dict(input_ids=ids, attention_mask=padding),
        "drafts": dict(input_ids=ids[:1].repeat(1, 2), prompt_lookup_num_tokens=4),
        "beams": dict(input_ids=ids, num_beams=2),
    }
    for scheme in schemes:
        modes = {"reference": dict(lowering="eager"), "": {}, "replayed": dict(mode="reduce-overhead")}
        found: dict[str, dict] = {}
        for how, options in modes.items():
            variant = kvpass.apply(sharing_weights(model), scheme, **{"lowering": lowering, **options})
            found[how] = {}
            for name, call in calls.items():
                try:
                    found[how][name] = variant.generate(
                        **call, max_new_tokens=new, do_sample=False, output_logits=True, return_dict_in_generate=True
                    )
                except Exception as error:
                    found[how][name] = error
        for how, name in ((how, name) for how in list(modes)[1:] for name in calls):
            yield dict(scheme=scheme, call=name, how=how, **_agreement(found[how][name], found["reference"][name]))


def _agreement(got, expected) -> dict:
    for each in (got, expected):
        if isinstance(each, Exception):
            return _failed(each)
    same = (got.sequences == expected.sequences).all(0)
    count = int(same.long().cumprod(0).sum()) - (got.sequences.shape[1] - len(got.logits))
    rows = range(min(count + 1, len(got.logits)))
    difference = max((got.logits[i] - expected.logits[i]).abs().max().item() for i in rows)
    return dict(same_tokens=count, difference=difference, good=difference <= _CLOSE)


def replays(
    device: torch.device, schemes=_CHECKED, prompt: int = 700, steps: int = 200, shape: tuple[int, ...] = _SMALL,
    lowering: str = "auto",
) -> Iterator[dict]:  # fmt: skip
    """For each scheme, the largest difference of float32 logits from eager execution, and what was replayed."""
    model = llama(device, torch.float32, *shape, vocab_size=256)
    ids = torch.randint(256, (1, prompt + steps), device=device)
    for scheme in schemes:
        logits = []
        try:
            for options in (dict(lowering="eager"), dict(lowering=lowering, mode="reduce-overhead")):
                variant = kvpass.apply(sharing_weights(model), scheme, **options)
                cache = DynamicCache(config=model.config)
                fill(variant, cache, ids, 0, prompt)
                calls = range(prompt, prompt + steps)
                logits.append([variant(input_ids=ids[:, i : i + 1], past_key_values=cache).logits for i in calls])
        except Exception as error:
            yield dict(scheme=scheme, **_failed(error))
            continue
        difference = max((one - other).abs().max().item() for one, other in zip(*logits, strict=True))
        steps_line = str(kvpass.explain(variant)).splitlines()[-1].strip()
        yield dict(scheme=scheme, difference=difference, steps=steps_line, good=difference <= _CLOSE)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def per_step(call: Callable, steps: int, device: torch.device) -> dict:
    """Milliseconds of a step until the host is free again, in total, and of work on the device; and the slowest
    kernels."""
    for _ in range(_WARM if device.type == "cuda" else 5):  # compiles, captures, and quantizes a page
        call()
    _wait(device)
    begin = time.perf_counter()
    for _ in range(steps):
        call()
    free = time.perf_counter()
    _wait(device)
    whole = time.perf_counter()
    cuda = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as seen:
        for _ in range(4):
            call()
        _wait(device)
    spent = {each.key: getattr(each, f"self_{'device' if cuda else 'cpu'}_time_total") for each in seen.key_averages()}
    longest = sorted(spent, key=spent.__getitem__, reverse=True)[:_LONGEST]
    return dict(
        host=1e3 * (free - begin) / steps, whole=1e3 * (whole - begin) / steps, device=sum(spent.values()) / 4e3,
        longest={name[:80]: spent[name] / 4e3 for name in longest},
    )  # fmt: skip


def _static(model, batch: int, ids: torch.Tensor, room: int) -> tuple[Callable, object]:
    """transformers' static cache, with a forward compiled into CUDA graphs."""
    cache = StaticCache(config=model.config, max_cache_len=ids.shape[1] + room)
    fill(model, cache, ids.expand(batch, -1), 0, ids.shape[1], max(16, 8192 // batch))
    return torch.compile(model.forward, mode="reduce-overhead"), cache


def _dynamic(model, batch: int, ids: torch.Tensor) -> tuple[Callable, object]:
    """A cache, packed or not, of one prompt that is repeated for the batch."""
    cache = DynamicCache(config=model.config)
    fill(model, cache, ids, 0, ids.shape[1])
    if batch > 1:
        cache.batch_repeat_interleave(batch)
    return model, cache


def _quantized(model, how: dict, batch: int, ids: torch.Tensor) -> tuple[Callable, object]:
    run, cache = _dynamic(model, batch, ids)
    return run, requantized(cache, model.config, how)


def variants(model, schemes, room: int) -> dict[str, Callable]:
    """The compared variants by name. Each turns a batch size and ids ``[1, S]`` into a forward and a cache filled with
    them."""
    found: dict[str, Callable] = {"static": partial(_static, sharing_weights(model), room=room)}
    found["default"] = partial(_dynamic, model)
    for name, how in quantized(model.config).items():
        found[name] = partial(_quantized, model, how)
    for scheme in schemes:
        applied = kvpass.apply(sharing_weights(model), scheme, mode="reduce-overhead")
        found[f"{scheme}, replayed"] = partial(_dynamic, applied)
    found[f"{schemes[0]}, compiled"] = partial(_dynamic, kvpass.apply(sharing_weights(model), schemes[0]))
    return found


def step(
    device: torch.device, lengths=(4096, 32768), steps: int = 32, shape: tuple[int, ...] = EIGHT_BILLION,
    dtype: torch.dtype = torch.bfloat16, schemes=("kivi", "higgs", "waterfill"),
) -> Iterator[dict]:  # fmt: skip
    """The time of a step of one sequence, by length and variant."""
    model = llama(device, dtype, *shape)
    compared = variants(model, schemes, steps + _ROOM)
    for length in lengths:
        ids = torch.randint(1000, (1, length), device=device)
        for name, made in compared.items():
            row = dict(length=length, variant=name)
            try:
                run, cache = made(1, ids)
                yield row | per_step(partial(run, input_ids=ids[:, :1], past_key_values=cache), steps, device)
            except Exception as error:
                yield row | _failed(error)
            run = cache = None


def due(
    device: torch.device, lengths=(8192, 32768), steps: int = 64, shape: tuple[int, ...] = (8, *EIGHT_BILLION[1:]),
    dtype: torch.dtype = torch.bfloat16, schemes=("kivi", "waterfill", "waterfill-heads", "waterfill-static"),
    lowering: str = "auto",
) -> Iterator[dict]:  # fmt: skip
    """Milliseconds of every one of ``steps`` steps, each waiting for the device: the median, the mean, and those that
    take longer than 1.5 medians, among them the ones that quantize a page. "waterfill-static" is calibrated on random
    tokens."""
    model = llama(device, dtype, *shape)
    data = torch.randint(1000, (4, 256), device=device)
    calibrated: dict = {}
    for scheme, length in itertools.product(schemes, lengths):
        row = dict(scheme=scheme, length=length)
        try:
            if get(scheme).needs_calibration and scheme not in calibrated:
                with torch.inference_mode(False), torch.enable_grad():
                    calibrated[scheme] = kvpass.calibrate(model, data.clone(), scheme, progress=False)
            fitted = calibrated.get(scheme, scheme)
            options = dict(mode="reduce-overhead") if device.type == "cuda" else {}
            run = kvpass.apply(sharing_weights(model), fitted, lowering=lowering, **options)
            cache, times = DynamicCache(config=model.config), []
            fill(run, cache, data.flatten()[torch.arange(length) % data.numel()][None], 0, length, 2048)
            for _ in range(steps + 8):
                _wait(device)
                begin = time.perf_counter()
                run(input_ids=data[:1, :1], past_key_values=cache)
                _wait(device)
                times.append(1e3 * (time.perf_counter() - begin))
            usual = statistics.median(times[8:])
            longer = {i: taken for i, taken in enumerate(times[8:]) if taken > 1.5 * usual}
            yield row | dict(median=usual, mean=statistics.fmean(times[8:]), longer=longer)
        except Exception as error:
            yield row | _failed(error)


def throughput(
    device: torch.device, length: int = 8192, batches=(1, 16), steps: int = 32, shape: tuple[int, ...] = EIGHT_BILLION,
    dtype: torch.dtype = torch.bfloat16, schemes=("kivi",), largest: int = 1024,
) -> Iterator[dict]:  # fmt: skip
    """Tokens per second by batch and variant, and at the ``largest`` batch that fits each variant; a batch that does
    not fit is reduced by an eighth."""
    model = llama(device, dtype, *shape)
    ids = torch.randint(1000, (1, length), device=device)
    for name, made in variants(model, schemes, steps + _ROOM).items():
        full = min(largest, _that_fit(made, ids, device))
        for batch in (*batches, full):
            row = dict(variant=name, length=length, batch=batch, full=batch == full)
            while batch:
                try:
                    run, cache = made(batch, ids)
                    token = ids[:, :1].expand(batch, 1).contiguous()
                    found = per_step(partial(run, input_ids=token, past_key_values=cache), steps, device)
                    yield row | dict(batch=batch, tokens=1e3 * batch / found["whole"], **found)
                    break
                except torch.OutOfMemoryError:
                    batch -= -(-batch // 8)
                except Exception as error:
                    yield row | _failed(error)
                    break
                finally:
                    run = cache = None
                    if device.type == "cuda":
                        torch.cuda.empty_cache()


def _that_fit(made: Callable, ids: torch.Tensor, device: torch.device) -> int:
    """The number of sequences of a variant that fit in memory, from the size of one. Unlimited on a CPU."""
    if device.type != "cuda":
        return 4
    try:
        before = torch.cuda.mem_get_info(device)[0]
        kept = made(1, ids)
        torch.cuda.empty_cache()
        one = max(1, before - torch.cuda.mem_get_info(device)[0])
        del kept
        torch.cuda.empty_cache()
        return max(1, int(0.95 * before / one))
    except Exception:  # reported when it is measured
        return 1


def capacity(
    device: torch.device, schemes=("identity", "kivi", "kivi-4", "squat", "higgs", "waterfill"),
    lengths=(4096, 8192, 32768, 131072), shape: tuple[int, ...] = EIGHT_BILLION, weights: int = 16_060_000_000,
    memory: int | None = None,
) -> Iterator[dict]:  # fmt: skip
    """Sequences that fit next to ``weights`` bytes into ``memory`` (default: that of the device, or 80 GiB), from the
    sizes of the tensors that a layer allocates. Nothing is allocated."""
    layers, hidden, heads, kv_heads = shape
    if memory is None:
        memory = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 80 << 30
    for scheme in schemes:
        for length in lengths:
            geometry = LayerGeometry(0, layers, kv_heads, hidden // heads, torch.bfloat16, torch.device("meta"))
            plan = get(scheme).plan(geometry)
            room = 1, kv_heads, hidden // heads, torch.bfloat16, "meta", length
            each = layers * sum(KVState.allocate(spec, *room).nbytes for spec in (plan.key, plan.value))
            yield dict(scheme=scheme, length=length, bytes_each=each, sequences=(memory - weights) // each)
