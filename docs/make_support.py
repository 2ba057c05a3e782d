"""Writes docs/support.md: python docs/make_support.py [--check]

Which implementation runs each operation of each scheme, as `kvpass.lowering.table` chooses it. Run it without
TRITON_INTERPRET, which takes Triton off CUDA devices. ``--check`` writes nothing, and fails if the page is out of date.
"""

import sys
from pathlib import Path

import torch

from kvpass import KVPassError
from kvpass import ops as _ops  # noqa: F401  (registers implementations)
from kvpass.lowering.append import stands_alone
from kvpass.lowering.table import DispatchKey, select
from kvpass.paged import paged_attention as _paged_attention  # noqa: F401  (so does this)
from kvpass.schemes import CalibratedWaterfillConfig, LayerGeometry, LayerPlan, SchemeConfig, available, get
from kvpass.vllm.serving_config import Served

PAGE = Path(__file__).with_name("support.md")
LAYERS, HEADS, HEAD_DIM, DTYPE = 4, 8, 128, torch.bfloat16
ATTENTION = {  # query tokens, 0 for more than are drafted; what attention does besides
    "one token": (1, ()),
    "one token, padded": (1, ("mask",)),
    "drafts": (5, ()),
    "prompt chunk": (0, ()),
}
HEAD = f"""# Support matrix

Made by `python docs/make_support.py` from the table that chooses at run time (`lowering/table.py`), for layers of
{HEADS} KV heads, `head_dim` {HEAD_DIM}, {str(DTYPE).removeprefix("torch.")}.

**cpp**, **cpp-grid**, **cpp-lattice** and **triton** are hand-written kernels, and **inductor** is compiled by
Inductor: in attention, they read quantized pages. **inductor-tiled** and **tiled** dequantize a tile of pages at a
time, multiply it with all queries, and combine the tiles by a running softmax; **inductor-dense** dequantizes all
keys and values first. The first and the last of these dequantize by a compiled kernel where the codec has one.
`lowering="inductor"` takes whichever of its three implementations serves a call. **reference** is plain PyTorch over
dequantized keys and values: correct, but slower, and with as much memory as a cache in full precision. Which Triton
kernels have run on a GPU, and how fast, is in [On a GPU](gpu.md).

*Store* quantizes tokens that leave the window, keys / values where they differ; *drafts* are 2 to 16 query tokens,
and a *prompt chunk* has more, behind tokens that are stored.
*vLLM*, whose CPU platform is supported, names what attends with one token of each request, over vLLM's blocks, or says
*no* where a scheme is refused at start, with the reason. `kvpass.explain(model)` and the log of `kvpass.lowering` say
what runs in a model, and why not another.

"""


def plan_of(scheme: SchemeConfig) -> LayerPlan:
    """The plan of a layer that is neither the first nor the last."""
    return scheme.plan_of(LayerGeometry(1, LAYERS, HEADS, HEAD_DIM, DTYPE, torch.device("cpu"), previous_layer=0))


def row(name: str, device: str) -> list[str]:
    """Who stores and attends on ``device``."""
    plan = plan_of(get(name))
    specs = str(plan.key), str(plan.value)
    stores = []
    for spec in (plan.key, plan.value):
        op = "append_layers_" if stands_alone(spec) else "append_"
        stores.append(select(DispatchKey(op, device, (str(spec),), 0, HEAD_DIM)).name)
    cells = [" / ".join(dict.fromkeys(stores))]
    for queries, extras in ATTENTION.values():
        scored = ("attention mass",) if plan.key.statistic else ()
        key = DispatchKey("attend", device, specs, queries, HEAD_DIM, DTYPE, (*extras, *scored))
        cells.append(select(key).name)
    return cells


def in_vllm(name: str) -> str:
    """Who attends with one token of each request in vLLM, or that the scheme is refused."""
    scheme = get(name)
    try:
        calibrated = isinstance(scheme, CalibratedWaterfillConfig) and scheme.form == "static"
        plan = plan_of(scheme) if calibrated else Served(scheme, LAYERS, HEADS, HEAD_DIM, DTYPE).plan
    except KVPassError:
        return "no"
    specs = str(plan.key), str(plan.value)
    return select(DispatchKey("paged_attend_one", "cpu", specs, 1, HEAD_DIM, DTYPE)).name


def page() -> str:
    """docs/support.md."""
    parts = []
    for device, title in (("cpu", "CPU"), ("cuda", "CUDA")):
        columns = ["scheme", "store", *ATTENTION, *(["vLLM"] if device == "cpu" else [])]
        lines = [f"## {title}\n", f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
        same: dict[tuple[str, ...], list[str]] = {}
        for name in available():
            cells = [*row(name, device), *([in_vllm(name)] if device == "cpu" else [])]
            same.setdefault(tuple(cells), []).append(f"`{name}`")
        lines += [f"| {', '.join(names)} | {' | '.join(cells)} |" for cells, names in same.items()]
        parts.append("\n".join(lines))
    return HEAD + "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    made = page()
    if "--check" not in sys.argv:
        PAGE.write_text(made, encoding="utf-8")
    elif made != PAGE.read_text(encoding="utf-8"):
        sys.exit("docs/support.md is out of date: python docs/make_support.py")
