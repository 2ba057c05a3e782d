"""A calibration in place of a scheme, for servers: whose model it is, the heads of each process, its blocks, and chunks
of a prefix store. None of this needs vLLM."""

import pytest
import torch
from test_shares import SMALL

import kvpass
from kvpass import KVPassError
from kvpass.codec.bitpack import unpack
from kvpass.codec.page_rope import PageTables, from_page_rope, mean_in_page, to_page_rope
from kvpass.codec.token_ranks import choose
from kvpass.prefix_store import EntropyChunkCodec, LayerShape
from kvpass.vllm.calibrated_scheme import CalibratedScheme, heads_of_rank
from kvpass.vllm.serving_config import Served, ServedCalibration, options_asked
from kvpass.vllm.store_config import StoreConfig

from tiny import llama, tokens
from zoo import ZOO

CHUNK = 32


@pytest.fixture(scope="module")
def model():
    return llama(seed=1)


@pytest.fixture(scope="module")
def weights(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    found = kvpass.calibrate(model, [tokens(1, 120, seed) for seed in range(2)], SMALL, progress=False)
    return str(found.save(tmp_path_factory.mktemp("calibrated")))


@pytest.fixture(scope="module")
def scheme(folder):
    return CalibratedScheme.of(folder)


def test_a_folder_is_a_scheme(folder, scheme):
    asked = [options_asked({"kvpass": folder}, {}), options_asked({}, {"KVPASS_SCHEME": folder})]
    assert [one.scheme for one in asked] == [scheme, scheme]
    assert StoreConfig.of({"scheme": folder, "cpu_bytes": 1}).scheme == scheme
    with pytest.raises(KVPassError, match=r"leave out \['bits'\]"):
        options_asked({"kvpass": {"scheme": folder, "bits": 4}}, {})


def test_other_calibrations_are_refused(model, tmp_path):
    hybrid = kvpass.calibrate(model, [tokens(1, 120, seed) for seed in range(2)], SMALL | {"form": "hybrid"})
    with pytest.raises(KVPassError, match=r"hybrid: fitted to each prompt.*calibrate"):
        CalibratedScheme.of(str(hybrid.save(tmp_path)))


def test_the_model_is_checked_by_class_settings_and_weights(model, weights, scheme, tmp_path):
    scheme.check_model(model.config, weights)
    changed = llama(seed=1)
    with torch.no_grad():
        changed.model.layers[0].mlp.down_proj.weight.mul_(1.5)
    changed.save_pretrained(tmp_path)
    with pytest.raises(KVPassError, match="was calibrated on other weights"):
        scheme.check_model(model.config, tmp_path)
    other = llama(seed=1).config
    other.rms_norm_eps = 0.5
    with pytest.raises(KVPassError, match="rms_norm_eps"):
        scheme.check_model(other, weights)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(KVPassError, match="is in none of its safetensors files"):
        scheme.check_model(model.config, tmp_path)


def test_processes_divide_heads():
    assert [heads_of_rank(4, 2, rank) for rank in range(2)] == [slice(0, 2), slice(2, 4)]
    assert [heads_of_rank(2, 4, rank) for rank in range(4)] == [slice(0, 1), slice(0, 1), slice(1, 2), slice(1, 2)]


def test_each_process_has_the_bits_of_its_own_heads(model, scheme):
    heads, head_dim = scheme.heads_of(0)
    whole = ServedCalibration(scheme, heads, head_dim, torch.float32)
    parts = [ServedCalibration(scheme, 1, head_dim, torch.float32, heads, rank) for rank in range(heads)]
    for index, layer in whole.layers.items():
        sizes = [part.layers[index].page_bytes for part in parts]
        assert tuple(map(sum, zip(*sizes, strict=True))) == layer.page_bytes
        for rank, part in enumerate(parts):
            assert torch.equal(part.layers[index].key["widths"][0, 0], layer.key["widths"][0, rank])
    size = 64
    assert len({part.block_bytes(size) for part in parts}) == 1  # as vLLM needs it
    assert all(part.layout(size).nbytes <= part.block_bytes(size) for part in parts)
    with pytest.raises(KVPassError, match="each process has 2 of"):
        ServedCalibration(scheme, 2, head_dim, torch.float32, heads, 0)


def test_blocks_of_all_layers_hold_whole_pages_and_windows_divide_them(scheme):
    for dtype in (torch.float32, torch.bfloat16):
        one = ServedCalibration(scheme, *scheme.heads_of(0), dtype)
        size = one.block_size()
        assert size % one.page_size == 0 and size % one.window_block(size) == 0
        assert one.window_block(size) * one.exact_bytes <= one.block_bytes(size)
        with pytest.raises(KVPassError, match="multiple of 16"):
            one.layout(40)
    with pytest.raises(KVPassError, match=r"Calibrate once.*Use kivi-sinks"):
        Served(scheme.scheme, 2, 2, 16, torch.float32)


@pytest.fixture(scope="module")
def stored(scheme):
    """The layers of the model, their shapes, and keys and values of three chunks."""
    heads, head_dim = scheme.heads_of(0)
    layers = scheme.layers(1, 0, torch.float32)
    shapes = dict.fromkeys(layers, LayerShape(heads, head_dim, torch.float32))
    generator = torch.Generator().manual_seed(0)
    given = [[torch.randn(heads, 3 * CHUNK, head_dim, generator=generator) for _ in layers] for _ in range(2)]
    return layers, shapes, given


def test_chunks_are_quantized_by_the_numbers_of_their_pages(stored):
    """Against codes by the definition, one layer at a time; each chunk alone as with others; sinks are exact in the
    first."""
    layers, shapes, given = stored
    one = EntropyChunkCodec(shapes, layers, CHUNK)
    chunks = one.quantize([0, 1, 4], *given)
    for number, chunk in zip((0, 1, 4), chunks, strict=True):
        wanted = one.shapes(number == 0)
        assert chunk.keys() == wanted.keys() and all(chunk[name].dtype == kind for name, (_, kind) in wanted.items())
    found = one.dequantize([0, 1, 4], chunks)
    for side, expected in zip(found, given, strict=True):
        assert all(torch.equal(a[:, :2], b[:, :2]) for a, b in zip(side, expected, strict=True))
    alone = one.dequantize([4], chunks[2:])
    for side, whole in zip(alone, found, strict=True):
        assert all(torch.equal(a, b[:, 2 * CHUNK :]) for a, b in zip(side, whole, strict=True))
    place, layer = 1, list(layers.values())[1]
    size = layer.key_spec.page_size
    middle = torch.cat([torch.arange(size), 4 * CHUNK + torch.tensor([size // 2, size + size // 2])])
    angles = (middle[:, None] * layer.angles.double())[None]
    tables = PageTables(angles.cos().float(), angles.sin().float(), layer.rope)
    keys = to_page_rope(given[0][place][None, :, 2 * CHUNK :], tables, 0, size)
    mean = mean_in_page(layer.key["center"], tables, size).repeat(1, 1, 2, 1)
    rich = choose(keys - mean, layer.key_spec, layer.key["queries"])
    high = unpack(rich, 1).flatten(2).bool()[0]  # [H, T]
    for x, tensors, side in ((keys - mean, layer.key, 0), (given[1][place][None, :, 2 * CHUNK :], layer.value, 1)):
        heads = x.shape[1]
        width = tensors["basis"].shape[-1]
        expected = torch.empty_like(x[0])
        for h in range(heads):
            basis = torch.block_diag(*tensors["basis"][0, h].float().view(-1, width, width))
            steps = torch.where(high[h][:, None], *tensors["steps"][0, h].float())
            codes = (torch.linalg.solve(basis.T, x[0, h].T).T / steps).round()
            expected[h] = codes * steps @ basis
        if side == 0:
            expected = from_page_rope(expected[None] + mean, tables, 0, size)[0]
        error = (found[side][place][:, 2 * CHUNK :] - expected).abs()
        assert float((error > 1e-3).float().mean()) < 1e-3  # rounding of a few codes at the edge of a step


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["Llama", "GLM"])
@pytest.mark.parametrize("changed", [{}, {"ranked": False}], ids=str)
def test_the_kernel_dequantizes_what_plain_pytorch_does(name, changed, dtype, tmp_path):
    """Also where codes are too large for a byte, and where only some channels are rotated, in interleaved pairs."""
    model, texts = ZOO[name].model("sdpa"), [tokens(1, 120, seed) for seed in range(2)]
    found = kvpass.calibrate(model, texts, SMALL | {"block_size": 16} | changed, progress=False)
    scheme = CalibratedScheme.of(str(found.save(tmp_path)))
    heads, head_dim = scheme.heads_of(0)
    layers = scheme.layers(1, 0, dtype)
    shapes = dict.fromkeys(layers, LayerShape(heads, head_dim, dtype))
    generator = torch.Generator().manual_seed(0)
    given = [[torch.randn(heads, 3 * CHUNK, head_dim, generator=generator).to(dtype) for _ in layers] for _ in range(2)]
    for x in (*given[0], *given[1]):
        x[0, 40, 3], x[1, 70] = 300.0, -50.0
    codecs = [EntropyChunkCodec(shapes, layers, CHUNK, lowering=lowering) for lowering in ("auto", "reference")]
    chunks = codecs[0].quantize([0, 1, 7], *given)
    assert all(len(chunk["exceptions"]) for chunk in chunks[1:])
    fused, plain = (codec.dequantize([0, 1, 7], chunks) for codec in codecs)
    for a, b in zip([*fused[0], *fused[1]], [*plain[0], *plain[1]], strict=True):
        torch.testing.assert_close(a, b, atol=1e-4 if dtype == torch.float32 else 0.02, rtol=0.01)


def test_a_truncated_stream_is_refused(stored):
    layers, shapes, given = stored
    one = EntropyChunkCodec(shapes, layers, CHUNK)
    chunk, *_ = one.quantize(range(3), *given)
    other = EntropyChunkCodec(shapes, layers, 2 * CHUNK)
    with pytest.raises(KVPassError, match="corrupt"):
        other.dequantize([0], [chunk])


def test_more_bits_make_chunks_larger_and_closer(scheme, stored):
    _, shapes, (keys, values) = stored
    sizes, errors = [], []
    for bits in (1.0, None, 3.0, 6.0):
        one = EntropyChunkCodec(shapes, scheme.storing(bits).layers(1, 0, torch.float32), CHUNK)
        chunks = one.quantize(range(3), keys, values)
        sizes.append(one.nbytes(False))
        found = one.dequantize(range(3), chunks)
        pairs = [(a, b) for side, given in zip(found, (keys, values), strict=True)
                 for a, b in zip(side, given, strict=True)]  # fmt: skip
        errors.append(sum(float((a - b).square().sum()) for a, b in pairs))
    assert sizes == sorted(sizes) and errors == sorted(errors, reverse=True)
    with pytest.raises(KVPassError, match="above 0 and at most 8"):
        scheme.storing(0)


def test_each_rank_stores_its_own_heads(scheme, stored):
    layers, shapes, (keys, values) = stored
    whole = EntropyChunkCodec(shapes, layers, CHUNK)
    expected = whole.dequantize(range(3), whole.quantize(range(3), keys, values))
    halves = {index: LayerShape(shape.heads // 2, shape.head_dim, shape.dtype) for index, shape in shapes.items()}
    for rank in range(2):
        own = slice(rank * halves[0].heads, (rank + 1) * halves[0].heads)
        one = EntropyChunkCodec(halves, scheme.layers(2, rank, torch.float32), CHUNK)
        found = one.dequantize(range(3), one.quantize(range(3), [x[own] for x in keys], [x[own] for x in values]))
        for side, of_all in zip(found, expected, strict=True):
            for a, b in zip(side, of_all, strict=True):
                assert float(((a - b[own]).abs() > 1e-3).float().mean()) < 1e-3


def test_chunks_of_calibrated_layers_hold_whole_pages(stored):
    layers, shapes, _ = stored
    with pytest.raises(KVPassError, match="multiple of 16"):
        EntropyChunkCodec(shapes, layers, 24)
