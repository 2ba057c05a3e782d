"""`kernel_store` and `background_compile` of `kvpass.lowering.inductor`: kernels on disk, and the processes that put
them there."""

import logging

import pytest
import torch
from torch._inductor import config
from torch._inductor.utils import fresh_inductor_cache

import kvpass
from kvpass.errors import KVPassError
from kvpass.lowering.inductor import background_compile, first_kernel, kernel_store
from kvpass.lowering.inductor.aot import Input, Kernel, Program
from kvpass.lowering.inductor.attend import attend_kernel

from tiny import llama, tokens

CPU = torch.device("cpu")
traced = []


@Kernel
def scaled_sum(factor: float) -> Program:
    """Other processes compile it too, and find it by its name."""

    def fn(x):
        traced.append(factor)
        return ((x * factor).sum(-1),)

    return Program(fn, [Input("x", torch.empty(7, 4), [0])])


@pytest.fixture
def empty():
    """No kernel is compiled, neither in memory nor on disk."""
    with fresh_inductor_cache():
        scaled_sum.cache_clear()
        traced.clear()
        yield
    scaled_sum.cache_clear()


def place(factor: float = 2.0):
    return kernel_store.place_of(CPU, scaled_sum.name, factor)


def check(factor: float, rows: int) -> None:
    x = torch.randn(rows, 4)
    torch.testing.assert_close(scaled_sum(factor)(x)[0], (x * factor).sum(-1))


@pytest.mark.usefixtures("empty")
def test_the_next_process_neither_traces_nor_compiles_and_gets_the_same_for_every_size():
    check(2.0, 7)
    assert traced == [2.0] and place().exists()
    scaled_sum.cache_clear()  # as in another process
    for rows in (7, 2, 50):
        check(2.0, rows)
    check(3.0, 5)
    assert traced == [2.0, 3.0]


@pytest.mark.usefixtures("empty")
@pytest.mark.parametrize("content", [b"", b"no artifact", None])
def test_broken_files_are_recompiled_and_replaced(content, caplog):
    check(2.0, 7)
    whole = place().read_bytes()
    place().write_bytes(whole[: len(whole) // 2] if content is None else content)
    scaled_sum.cache_clear()
    with caplog.at_level(logging.WARNING, "kvpass.lowering"):
        check(2.0, 5)
    assert traced == [2.0, 2.0] and "is recompiled" in caplog.text
    scaled_sum.cache_clear()
    check(2.0, 3)
    assert traced == [2.0, 2.0]


def test_nothing_that_a_kernel_depends_on_changes_without_its_name(monkeypatch):
    names = [place(), place(3.0), kernel_store.place_of(CPU, "another", 2.0)]
    for settings in ({"cpp.simdlen": 256}, {"emulate_precision_casts": True}):
        with config.patch(settings):
            names.append(place())
    threads, dtype = torch.get_num_threads(), torch.get_default_dtype()
    try:
        torch.set_num_threads(threads + 1)
        names.append(place())
        torch.set_num_threads(threads)
        torch.set_default_dtype(torch.float64)
        names.append(place())
    finally:
        torch.set_num_threads(threads)
        torch.set_default_dtype(dtype)
    for name, changed in (("torch_key", lambda: b"another torch"), ("_source", lambda: b"other modules")):
        with monkeypatch.context() as patched:
            patched.setattr(kernel_store, name, changed)
            names.append(place())
    with monkeypatch.context() as patched:
        patched.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "another")
        names.append(place())
    assert len(set(names)) == len(names) and place() == names[0]


def test_the_hash_covers_all_sources_of_the_package(monkeypatch, tmp_path):
    for package in (kvpass, kvpass.lowering):
        monkeypatch.setattr(package, "__path__", [str(tmp_path)])
    hashes = []
    for name, text in (("a.py", "1"), ("a.py", "2"), ("deep/b.py", "1"), ("deep/c.py", "1")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
        hashes.append(kernel_store._source.__wrapped__())
    (tmp_path / "deep/c.py").rename(tmp_path / "d.py")
    hashes.append(kernel_store._source.__wrapped__())
    assert len(set(hashes)) == 5


@pytest.mark.usefixtures("empty")
def test_nothing_is_kept_where_caches_are_off_or_for_other_devices():
    for off in ({"force_disable_caches": True}, {"fx_graph_cache": False}):
        with config.patch(off):
            assert place() is None
            scaled_sum.cache_clear()
            check(2.0, 7)
    assert kernel_store.place_of(torch.device("cuda"), scaled_sum.name, 2.0) is None
    assert traced == [2.0, 2.0] and not place().exists()


@pytest.mark.slow
@pytest.mark.usefixtures("empty")
def test_background_compilation_falls_back_to_this_process(monkeypatch):
    monkeypatch.setenv(background_compile.SWITCH, "1")
    background_compile.start(CPU, [(scaled_sum.name, (2.0,)), ("no.such.kernel", (1,)), (scaled_sum.name, (3.0,))])
    check(2.0, 7)
    assert not traced
    check(3.0, 7)  # that process has ended by then
    assert traced == [3.0] and not background_compile._pending


def test_the_environment_limits_compile_processes(monkeypatch):
    monkeypatch.setattr(background_compile, "_start", lambda wanted: started.append(len(wanted)))
    jobs = [(scaled_sum.name, (float(i),)) for i in range(5)]
    for allowed, expected in (("0", []), ("1", [5]), ("3", [2, 2, 1]), ("9", [1] * 5)):
        started: list[int] = []
        monkeypatch.setenv(background_compile.SWITCH, allowed)
        background_compile.start(CPU, jobs)
        assert started == expected
    monkeypatch.setenv(background_compile.SWITCH, "many")
    with pytest.raises(KVPassError, match="number of processes"):
        background_compile.start(CPU, jobs)


@pytest.mark.slow
@pytest.mark.nightly_cases("scheme5-1", "kivi-2", "higgs-1", "kivi+h2o-1", "squat-1")
@pytest.mark.parametrize(
    "scheme, batch",
    [("kivi", 1), ("kivi", 2), ("squat", 1), ("higgs", 1), ("kivi+h2o", 1), ({"scheme": "waterfill", "recent": 0}, 1)],
)
def test_the_kernel_predicted_during_the_prompt_is_that_of_the_step(scheme, batch, monkeypatch):
    jobs = []
    monkeypatch.setattr(first_kernel.background_compile, "start", lambda device, wanted: jobs.extend(wanted))
    attend_kernel.cache_clear()
    model = kvpass.apply(llama(), scheme)
    model.generate(tokens(batch, 70), max_new_tokens=3, do_sample=False)
    assert jobs == [(attend_kernel.name, key) for key in attend_kernel._compiled]
