"""Compiled kernels on disk, for the next process: neither traced nor compiled there again.

They lie in Inductor's cache directory, and are trusted as that is. A name is a hash of all that a kernel is made of:
our own source, torch, the settings of Inductor, threads, the processor, and the words that say which kernel it is. The
only file that knows how Inductor writes one; see ``tests/test_kernel_store.py``.
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
    """A hash of all modules that can have a say in a kernel."""
    roots = sorted({path for package in (kvpass, kvpass.lowering) for path in package.__path__})
    digest = sha256()
    for root in map(Path, roots):
        for file in sorted(root.rglob("*.py")):
            digest.update(str(file.relative_to(root)).encode() + file.read_bytes())
    return digest.digest()


def place_of(device: torch.device, *key: object) -> Path | None:
    """Where the kernel that ``key`` says in words, for ``device``, is kept under the present settings; None if
    kernels are not to be kept."""
    if device.type != "cpu" or config.force_disable_caches or not config.fx_graph_cache:
        return None
    digest = sha256(_source() + torch_key())
    machine = platform.machine(), torch.backends.cpu.get_cpu_capability(), torch.get_num_threads()
    for part in (machine, torch.get_default_dtype(), sorted(config.save_config_portable().items()), key):
        digest.update(repr(part).encode())
    return Path(cache_dir()) / "kvpass" / digest.hexdigest()


def load(place: Path) -> Callable[..., Sequence[Tensor]] | None:
    """The kernel kept at ``place``; None if there is none that can be read."""
    try:
        return AOTCompiledArtifact.load(path=str(place)).__call__ if place.exists() else None
    except Exception as error:
        logger.warning("%s cannot be read and is recompiled: %r", place, error)
        return None


def compile_and_keep(graph: GraphModule, fakes: Sequence[Tensor], place: Path) -> Callable[..., Sequence[Tensor]]:
    """Compile ``graph`` of fake inputs ``fakes``, within their `TracingContext`, and keep it at ``place``."""
    compiled = standalone_compile(graph, list(fakes), dynamic_shapes="from_tracing_context", options={}, aot=True)
    place.parent.mkdir(parents=True, exist_ok=True)
    compiled.save(path=str(place))
    return compiled
