"""Stores compiled kernels on disk, so that the next process neither traces nor compiles them.

Kernels are in Inductor's cache directory and are trusted like its contents. A file name is a hash of everything that a
kernel depends on: kvpass's source, torch, Inductor's settings, the number of threads, the processor, and the key of the
kernel. Only this file knows how Inductor serializes kernels; see ``tests/test_kernel_store.py``.
"""

import logging
import platform
from collections.abc import Callable, Sequence
from functools import cache
from hashlib import sha256
from pathlib import Path

import torch
from torch import Tensor
from torch._inductor import config
from torch._inductor.codecache import torch_key
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch._inductor.standalone_compile import AOTCompiledArtifact, standalone_compile
from torch.fx import GraphModule

import kvpass

logger = logging.getLogger("kvpass.lowering")


@cache
def _source() -> bytes:
    """A hash of the source of all modules that kernels may depend on."""
    roots = sorted({path for package in (kvpass, kvpass.lowering) for path in package.__path__})
    digest = sha256()
    for root in map(Path, roots):
        for file in sorted(root.rglob("*.py")):
            digest.update(str(file.relative_to(root)).encode() + file.read_bytes())
    return digest.digest()


def place_of(device: torch.device, *key: object) -> Path | None:
    """Path at which the kernel ``key`` for ``device`` is stored under the current settings; None if it is not to be
    stored."""
    if device.type != "cpu" or config.force_disable_caches or not config.fx_graph_cache:
        return None
    digest = sha256(_source() + torch_key())
    machine = platform.machine(), torch.backends.cpu.get_cpu_capability(), torch.get_num_threads()
    for part in (machine, torch.get_default_dtype(), sorted(config.save_config_portable().items()), key):
        digest.update(repr(part).encode())
    return Path(cache_dir()) / "kvpass" / digest.hexdigest()


def load(place: Path) -> Callable[..., Sequence[Tensor]] | None:
    """The kernel stored at ``place``; None if there is none, or it cannot be read."""
    try:
        return AOTCompiledArtifact.load(path=str(place)).__call__ if place.exists() else None
    except Exception as error:
        logger.warning("%s cannot be read and is recompiled: %r", place, error)
        return None


def compile_and_keep(graph: GraphModule, fakes: Sequence[Tensor], place: Path) -> Callable[..., Sequence[Tensor]]:
    """Compile ``graph`` with fake inputs ``fakes``, within their `TracingContext`, and store it at ``place``."""
    compiled = standalone_compile(graph, list(fakes), dynamic_shapes="from_tracing_context", options={}, aot=True)
    place.parent.mkdir(parents=True, exist_ok=True)
    compiled.save(path=str(place))
    return compiled
