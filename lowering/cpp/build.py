"""C++ kernels, built by Inductor's own builder: for this processor's vectors and torch's OpenMP, without torch's
headers, and kept in its cache for the next process. The only file that touches it; see ``tests/test_private_apis.py``.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from torch._inductor import config as inductor_config
from torch._inductor.codecache import CppPythonBindingsCodeCache

from kvpass.progress import announced

from ..inductor.aot import unprobed
from ..session import compiling

_FOLDER = Path(__file__).parent
OPTIONS = {"cpp_cache_precompile_headers": False, "cpp.enable_floating_point_contract_flag": "fast"}


def text(defines: Mapping[str, float], *files: str | Path, namespace: str = "") -> str:
    """``files``, by name if they are in this folder, one behind the other, for what is defined, in a ``namespace`` if
    one is named."""
    lines = [f"#undef {word}\n#define {word} {number}\n" for word, number in defines.items()]
    texts = [(_FOLDER / file).read_text() for file in files]
    return "".join([*lines, f"namespace {namespace} {{\n", *texts, "}\n"] if namespace else [*lines, *texts])


def source(defines: Mapping[str, float], *files: str | Path) -> str:
    """`text` behind vectors.h, which all others need."""
    return text({}, "vectors.h") + text(defines, *files)


@announced("kernels of a cache")
@compiling()
def build(source: str, types: Sequence[str]) -> Callable[..., None]:
    """The function ``kernel`` of a C++ ``source``, of arguments of ``types``: tensors for pointers, and ints."""
    with inductor_config.patch(OPTIONS | unprobed()):
        kernel: Callable[..., None] = CppPythonBindingsCodeCache.load_pybinding(list(types), source)
    return kernel
