"""The prefix store for servers, without vLLM: chunks, the memory's index, and files."""

import os
import random

import pytest
import torch
from safetensors.torch import save_file

from kvpass import KVPassError, schemes
from kvpass.prefix_store import ChunkCodec, ChunkFiles, ChunkIndex, DamagedFileError, LayerShape

TOKENS = 64


def codec(scheme, dtype=torch.bfloat16, layers=4, lowering="reference", **fields):
    shapes = {index: LayerShape(2, 64, dtype) for index in range(layers)}
    return ChunkCodec(schemes.get(scheme, **fields), shapes, layers, TOKENS, lowering=lowering)


def tokens(count, dtype=torch.bfloat16, layers=4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shape = (layers, 2, count * TOKENS, 64)
    offset = 3 * torch.randn(layers, 2, 1, 64, generator=generator)  # a mean, as keys have
    return [list((torch.randn(shape, generator=generator) + offset).to(dtype)) for _ in range(2)]


def error_of(found, expected):
    each = [((a.float() - b.float()).square().sum() / b.float().square().sum()).item()
            for a, b in zip(found, expected, strict=True)]  # fmt: skip
    return max(each)


# ---------------------------------------------------------------- chunks


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_an_identity_chunk_is_exact(dtype):
    one, (keys, values) = codec("identity", dtype), tokens(3, dtype)
    found = one.dequantize(range(3), one.quantize(range(3), keys, values))
    for side, expected in zip(found, (keys, values), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(side, expected, strict=True))


@pytest.mark.parametrize(
    ("scheme", "fields", "bound"),
    [
        ("kivi-4", {}, 0.02),
        ("kivi-4", {"sinks": 4}, 0.02),
        ("kivi-4", {"skip_layers": (1, 1)}, 0.02),
        ("higgs-sinks", {}, 0.2),
        ("turboquant-2.5", {}, 0.2),
        ("gear-4", {}, 0.02),
        ("asymkv-lsq", {}, 0.8),
    ],
)
def test_a_chunk_is_what_its_codec_makes_of_it(scheme, fields, bound):
    one, (keys, values) = codec(scheme, **fields), tokens(3)
    chunks = one.quantize(range(3), keys, values)
    for number, chunk in enumerate(chunks):
        shapes = {name: (tuple(x.shape), x.dtype) for name, x in chunk.items()}
        assert shapes == one.shapes(number == 0)
        assert sum(x.nbytes for x in chunk.values()) == one.nbytes(number == 0)
    found = one.dequantize(range(3), chunks)
    for side, expected in zip(found, (keys, values), strict=True):
        assert error_of(side, expected) < bound
    for number in range(3):  # each can be dequantized alone, and quantized alone
        span = slice(number * TOKENS, (number + 1) * TOKENS)
        alone = one.dequantize([number], chunks[number : number + 1])
        again = one.quantize([number], *([x[:, span] for x in side] for side in (keys, values)))[0]
        assert all(torch.equal(x, chunks[number][name]) for name, x in again.items())
        for side, whole in zip(alone, found, strict=True):
            assert all(torch.equal(a, b[:, span]) for a, b in zip(side, whole, strict=True))


def test_sinks_are_exact_in_the_first_chunk_alone():
    one, (keys, values) = codec("kivi-sinks"), tokens(2)
    found = one.dequantize(range(2), one.quantize(range(2), keys, values))
    for side, expected in zip(found, (keys, values), strict=True):
        for a, b in zip(side, expected, strict=True):
            assert torch.equal(a[:, :4], b[:, :4])
            assert not torch.equal(a[:, TOKENS : TOKENS + 4], b[:, TOKENS : TOKENS + 4])
    assert one.nbytes(True) > one.nbytes(False)
    assert one.full_nbytes == 2 * 4 * 2 * 64 * TOKENS * 2


def test_kernels_make_the_same_chunks():
    """What the table chooses, against plain PyTorch."""
    keys, values = tokens(2)
    chunks = [codec("kivi-4", sinks=4, lowering=lowering).quantize(range(2), keys, values)
              for lowering in ("auto", "reference")]  # fmt: skip
    for one, other in zip(*chunks, strict=True):
        assert one.keys() == other.keys() and all(torch.equal(x, other[name]) for name, x in one.items())


STORED = {
    "asymkv", "e8", "gear", "higgs", "higgs-sinks", "identity", "kitty", "kivi", "kivi-3", "kivi-4",
    "kivi-s8", "kivi-sinks", "kvarn", "polarquant", "quarot", "rtn", "turboquant", "turboquant-2.5", "zipcache",
}  # fmt: skip


def test_every_scheme_is_stored_or_refused_with_what_to_use():
    shapes, found = {index: LayerShape(2, 64, torch.bfloat16) for index in range(4)}, {}
    for name in schemes.available():
        try:
            ChunkCodec(schemes.get(name), shapes, 4, 128, lowering="reference")
        except KVPassError as error:
            found[name] = str(error)
    assert not STORED & set(found), found
    for name in ("aqua", "h2o", "kivi-pre", "logquant", "qaq", "squat", "waterfill", "waterfill-static", "xquant"):
        assert "Use " in found[name], found[name]


def test_chunks_hold_whole_pages():
    with pytest.raises(KVPassError, match="multiple of 128"):
        codec("kitty")


# ---------------------------------------------------------------- memory


def test_the_chunk_used_least_recently_is_dropped_first():
    index = ChunkIndex(30)
    assert index.reserve([(b"a", 10), (b"b", 10), (b"c", 10)]) == {}
    assert index.reserve([(b"d", 10)]) == {} and b"d" not in index  # the others are being stored
    for key in (b"a", b"b", b"c"):
        index.get(key).ready = True
    index.touch([b"b", b"a"])  # as a prompt that begins with b
    assert list(index.reserve([(b"d", 10)])) == [b"c"]
    index.get(b"d").ready = True
    assert list(index.reserve([(b"e", 10)])) == [b"a"] and index.nbytes == 30


def test_chunks_that_are_read_or_kept_are_not_dropped():
    index = ChunkIndex(20)
    index.reserve([(b"a", 10), (b"b", 10)])
    index.get(b"a").ready = index.get(b"b").ready = True
    index.get(b"a").readers = 1
    assert index.reserve([(b"c", 10)], keep=[b"b"]) == {} and b"c" not in index
    assert list(index.reserve([(b"c", 10)])) == [b"b"]
    assert index.reserve([(b"d", 21)]) == {} and b"a" in index  # nothing is dropped for what cannot fit


def test_chunks_that_turn_out_larger_push_others_out():
    index = ChunkIndex(30)
    index.reserve([(b"a", 10), (b"b", 10), (b"c", 10)])
    index.get(b"a").ready = index.get(b"b").ready = index.get(b"c").ready = True
    index.get(b"a").readers = 1
    assert index.grow(b"c", -5) == {} and index.nbytes == 25
    assert list(index.grow(b"c", 10)) == [b"b"] and index.nbytes == 25  # a is being read
    assert index.grow(b"b", 100) == {} and index.nbytes == 25  # it is gone


def test_the_index_never_exceeds_its_limit():
    choose, index = random.Random(0), ChunkIndex(100)
    generations = {}
    for _ in range(2000):
        keys = [bytes([choose.randrange(40)]) for _ in range(choose.randrange(1, 5))]
        dropped = index.reserve([(key, choose.randrange(1, 30)) for key in keys], keep=keys)
        assert not set(dropped) & set(keys) and not any(key in index for key in dropped)
        for key in keys:
            if (entry := index.get(key)) is not None:
                entry.ready = choose.random() < 0.9
                assert entry.generation >= generations.get(key, 0)
                generations[key] = entry.generation
        index.touch(keys)
        assert index.nbytes <= 100
    index.clear()
    assert not len(index) and not index.nbytes


# ---------------------------------------------------------------- files

KEY, OTHER = b"k" * 36, b"o" * 36
BELONGS_TO = {"scheme": "kivi-4", "skip_layers": (0, 1)}  # JSON changes tuples


@pytest.fixture
def written(tmp_path):
    """A codec, its files, and a chunk under `KEY`."""
    one = codec("kivi-4")
    (chunk,) = one.quantize([1], *tokens(1))
    files = ChunkFiles(tmp_path, BELONGS_TO)
    files.write(KEY, chunk)
    return one, files, chunk


def test_another_process_reads_what_was_written(tmp_path, written):
    one, _, chunk = written
    again = ChunkFiles(tmp_path, BELONGS_TO)
    assert again.has(KEY) and not again.has(OTHER) and not again.has(KEY, ranks=2)
    found = again.read(KEY, one.shapes(False))
    assert found.keys() == chunk.keys() and all(torch.equal(x, chunk[name]) for name, x in found.items())


def flip(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("damage", ["flipped", "header", "cut", "empty", "other tensors", "renamed", "text"])
def test_a_damaged_file_is_deleted(written, damage):
    one, files, chunk = written
    path = files.file(KEY)
    if damage == "flipped":
        flip(path, -100)
    elif damage == "header":
        flip(path, 40)
    elif damage == "cut":
        path.write_bytes(path.read_bytes()[:-1000])
    elif damage == "empty":
        path.write_bytes(b"")
    elif damage == "other tensors":
        save_file({"0.key.codes": torch.zeros(3)}, path)
    elif damage == "renamed":
        files.write(OTHER, chunk)
        files.file(OTHER).replace(path)
    else:
        path.write_text("no safetensors")
    with pytest.raises(DamagedFileError, match="deleted"):
        files.read(KEY, one.shapes(False))
    assert not files.has(KEY)
    with pytest.raises(DamagedFileError, match="gone"):
        files.read(KEY, one.shapes(False))


def test_no_flipped_bit_goes_unnoticed(written):
    one, files, chunk = written
    data = files.file(KEY).read_bytes()
    for at in random.Random(1).sample(range(len(data)), 60):
        files.file(KEY).write_bytes(data)
        flip(files.file(KEY), at)
        try:
            found = files.read(KEY, one.shapes(False))
        except DamagedFileError:
            continue
        assert all(torch.equal(x, chunk[name]) for name, x in found.items()), at


def test_stores_that_differ_do_not_see_each_other(tmp_path, written):
    one, files, _ = written
    assert not ChunkFiles(tmp_path, BELONGS_TO | {"scheme": "kivi-3"}).has(KEY)
    other = ChunkFiles(tmp_path, BELONGS_TO, rank=1)
    assert not other.has(KEY, ranks=2)
    files.file(KEY).replace(other.file(KEY))  # the heads of another rank
    with pytest.raises(DamagedFileError, match="another chunk"):
        other.read(KEY, one.shapes(False))
    files.write(KEY, written[2])
    with pytest.raises(DamagedFileError, match="other shapes"):  # as an engine of another dtype would ask
        files.read(KEY, codec("kivi-4", torch.float16).shapes(False))


def test_files_used_least_recently_are_deleted_first(tmp_path, written):
    one, files, chunk = written
    size = files.file(KEY).stat().st_size
    files = ChunkFiles(tmp_path, BELONGS_TO, limit=4 * size + size // 2)
    keys = [bytes([i]) * 36 for i in range(4)]
    for age, key in enumerate(keys[:3]):
        files.write(key, chunk)
        os.utime(files.file(key), (1000 + age, 1000 + age))
    os.utime(files.file(KEY), (999, 999))
    files.read(KEY, one.shapes(False))  # used now
    files.write(keys[3], chunk)
    assert [files.has(key) for key in (KEY, *keys)] == [True, False, True, True, True]
    other = ChunkFiles(tmp_path, {"model": "another"}, limit=4 * size + size // 2)  # the limit holds for all
    other.write(KEY, chunk)
    assert sum(path.stat().st_size for path in tmp_path.rglob("*.safetensors")) <= other.limit


def test_a_full_disk_is_an_error_of_the_system(monkeypatch, written):
    _, files, chunk = written

    def full(tensors, path, metadata):
        path.write_bytes(b"some")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("kvpass.prefix_store.chunk_files.save_file", full)
    with pytest.raises(OSError, match="No space"):
        files.write(OTHER, chunk)
    assert not files.has(OTHER) and not list(files.root.rglob("*.partial"))


def test_what_a_dead_process_left_is_deleted(tmp_path, written):
    _, files, _ = written
    left = files.file(KEY).with_name("some.partial")
    left.write_bytes(b"some")
    ChunkFiles(tmp_path, BELONGS_TO)
    assert left.exists()  # it may still be written
    os.utime(left, (1000, 1000))
    ChunkFiles(tmp_path, BELONGS_TO)
    assert not left.exists()


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(KVPassError, match="writable folder"):
        ChunkFiles(tmp_path / "file", {})
