"""C++ kernels, built by Inductor's own builder: for this processor's vectors and torch's OpenMP, without torch's headers,
and kept in its cache for the next process. The only file that touches it; see ``tests/test_private_apis.py``.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from torch._inductor import config as inductor_config
from torch._inductor.codecache import CppPythonBindingsCodeCache

from kvpass.progress import announced

from ..inductor.aot import unprobed
from ..session import compiling

OPTIONS = {"cpp_cache_precompile_headers": False, "cpp.enable_floating_point_contract_flag": "fast"}


@announced("kernels of a cache")
@compiling()
def build(files: Sequence[str], types: Sequence[str], defines: Mapping[str, int]) -> Callable[..., None]:
    """The function ``kernel`` of ``files`` of this folder, one behind the other, which takes arguments of C++ ``types``:
    tensors for pointers, ints and floats."""
    texts = [f"#define {name} {value}\n" for name, value in defines.items()]
    texts += [Path(__file__).with_name(name).read_text() for name in files]
    with inductor_config.patch(OPTIONS | unprobed()):
        kernel: Callable[..., None] = CppPythonBindingsCodeCache.load_pybinding(list(types), "".join(texts))
    return kernel
