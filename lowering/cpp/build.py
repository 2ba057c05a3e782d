"""Builds C++ kernels with Inductor's builder.

Kernels are built for this processor's vector instructions and torch's OpenMP, without torch's headers. Inductor's cache
keeps them for the next process. Only this file uses the builder; see ``tests/test_private_apis.py``.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from torch._inductor import config as inductor_config
from torch._inductor.codecache import CppPythonBindingsCodeCache

from kvpass.progress import announced

from ..inductor.aot import unprobed
from ..session import compiling

BYTES, FLOATS, INT32S, INT64S = "const uint8_t*", "const float*", "const int32_t*", "const int64_t*"
WRITTEN_BYTES, WRITTEN_FLOATS = "uint8_t*", "float*"
NUMBER, FRACTION = "int64_t", "float"
"""C++ types of the arguments of a kernel: tensors that it reads, tensors that it writes, and numbers."""
_FOLDER = Path(__file__).parent
OPTIONS = {"cpp_cache_precompile_headers": False}
_FUSED = "cpp.enable_floating_point_contract_flag"


def text(defines: Mapping[str, float], *files: str | Path, namespace: str = "") -> str:
    """The concatenated text of ``files``, preceded by ``defines``, inside of ``namespace`` if it is not empty. Relative
    names are files of this folder."""
    lines = [f"#undef {word}\n#define {word} {number}\n" for word, number in defines.items()]
    texts = [(_FOLDER / file).read_text() for file in files]
    return "".join([*lines, f"namespace {namespace} {{\n", *texts, "}\n"] if namespace else [*lines, *texts])


def source(defines: Mapping[str, float], *files: str | Path) -> str:
    """`text`, preceded by vectors.h, which all other files need."""
    return text({}, "vectors.h") + text(defines, *files)


@announced("kernels of a cache")
@compiling()
def build(source: str, types: Sequence[str], fused: bool = True) -> Callable[..., None]:
    """Compile C++ ``source`` and return its function ``kernel``. types: C++ types of its arguments; tensors are passed
    for pointers. fused: whether a product and a sum may be rounded once instead of twice."""
    with inductor_config.patch(OPTIONS | {_FUSED: "fast" if fused else "off"} | unprobed()):
        kernel: Callable[..., None] = CppPythonBindingsCodeCache.load_pybinding(list(types), source)
    return kernel
