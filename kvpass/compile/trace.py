"""Make the pass visible: the graph after each stage, what the stage changed, counts and times.

``KVPASS_TRACE=folder`` writes them for every graph, and `kvpass.explain` keeps them on request. Otherwise this does
nothing.
"""

from __future__ import annotations

import difflib
import os
import re
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from torch._ops import OpOverload
from torch.fx import GraphModule, Node

from ..errors import KVPassError
from .appends import FUNCTIONALIZED
from .attention_site import AttentionSite
from .calls import APPEND, APPEND_LAYERS, tensors_argument
from .nodes import function_of
from .report import GraphReport, Stage

VARIABLE = "KVPASS_TRACE"
_NOISE = re.compile(r";  (?:\w+ = )+None$|  # \w+AOT(?:In|Out)put\(.*\)$", re.MULTILINE)
"""Not in the text: parts that change with every use of a node, and AOTAutograd's notes, which no stage updates."""


def trace_folder() -> Path | None:
    """The folder that ``KVPASS_TRACE`` names, created if needed; None if it is not set. Raises `KVPassError` if the
    folder is not writable."""
    if not (name := os.environ.get(VARIABLE)):
        return None
    folder = Path(name).expanduser().absolute()
    with _writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    return folder


class Trace:
    """One graph on its way through the pass; a context manager, so that its end is recorded too.

    folder: where to write a folder for this graph; None writes nothing.
    keep: leave the stages in ``report``, which is set once there is one.
    """

    def __init__(self, gm: GraphModule, folder: Path | None, keep: bool):
        self.report: GraphReport | None = None
        self._keep, self._folder = keep, folder and _new_folder(folder)
        self._stages: list[Stage] = []
        self._refused: Sequence[str] = []
        self._found = self._written = 0
        self._since = time.perf_counter()
        self.stage("captured", gm)

    def stage(
        self,
        name: str,
        module: GraphModule | None = None,
        found: Sequence[AttentionSite] = (),
        refused: Sequence[str] = (),
    ) -> None:
        """Record that a stage has ended, and the graph that it leaves, if it leaves a readable one."""
        if not (self._keep or self._folder):
            return
        seconds = time.perf_counter() - self._since
        if name == "found":
            self._found, self._refused = len(found), refused  # this list may still grow
        if name == "rewritten":
            self._written = _written(module)
        text, ops = (_text(module, found, refused), _ops(module)) if module else ("", {})
        before = self._stages[-1] if self._stages else None
        diff = _diff(before, name, text) if before and module else ""
        self._stages.append(Stage(name, text, diff, ops, seconds if before else 0.0))
        if text:
            number = len(self._stages)
            self._write(f"{number}-{name}.txt", text)
            if before:
                self._write(f"{number}-{name}.diff", diff)
        self._since = time.perf_counter()

    def restart(self) -> None:
        """Forget all stages but the first, because the graph is processed again as a whole."""
        del self._stages[1:]
        self._since = time.perf_counter()

    def __enter__(self) -> Trace:
        return self

    def __exit__(self, kind, error: BaseException | None, traceback) -> None:
        if self._folder:
            self._write("summary.txt", self._summary(error))
        if self._keep and self.report:
            self.report.stages = self._stages

    def _write(self, name: str, text: str) -> None:
        if self._folder:
            with _writing(self._folder):
                (self._folder / name).write_text(text, encoding="utf-8")

    def _summary(self, error: BaseException | None) -> str:
        lines = [f"graph: {self._found} attentions found"]
        if self.report:
            lines = [str(self.report), f"  appends to {self._written} caches, of keys or of values"]
        lines += [f"  not fused ({times}x): {reason}" for reason, times in Counter(self._refused).items()]
        if error is not None:
            lines.append(f"gave up: {type(error).__name__}: {error}")
        lines += ["", f"{'stage':<12} {'nodes':>7} {'ms':>10}"]
        for stage in self._stages:
            ms = f"{1e3 * stage.seconds:,.1f}" if stage.seconds else ""
            lines.append(f"{stage.name:<12} {sum(stage.ops.values()) or '':>7} {ms:>10}".rstrip())
        graphs = [stage for stage in self._stages if stage.ops]
        names = sorted(set().union(*(stage.ops for stage in graphs)))
        width = max(map(len, names))
        lines += ["", " ".join([f"{'nodes':<{width}}", *(f"{stage.name:>10}" for stage in graphs)])]
        for name in names:
            counts = (f"{stage.ops.get(name, ''):>10}" for stage in graphs)
            lines.append(" ".join([f"{name:<{width}}", *counts]).rstrip())
        return "\n".join(lines) + "\n"


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise KVPassError(
            f"{VARIABLE}: cannot write to {folder} ({error.strerror}). Name another folder, or unset it."
        ) from error


def _new_folder(parent: Path) -> Path:
    """The first free ``graph-N``; other processes and earlier runs may write to the same parent."""
    number = 0
    with _writing(parent):
        while True:
            with suppress(FileExistsError):
                (folder := parent / f"graph-{number:03}").mkdir()
                return folder
            number += 1


def _text(module: GraphModule, found: Sequence[AttentionSite], refused: Sequence[str]) -> str:
    """``module`` as code with shapes and the lines of the model it comes from. Above the output of each attention in
    ``found`` is everything known about it."""
    code = _NOISE.sub("", module.print_readable(print_output=False, expanded_def=True))
    notes, lines = {attention.output.name: attention for attention in found}, []
    for line in code.splitlines():
        name = line.strip().partition(" ")[0].removesuffix(":")
        if name in notes:
            lines.append(f"{line[: len(line) - len(line.lstrip())]}# {notes[name]}")
        lines.append(line)
    return "\n".join([*lines, *(f"# refused: {reason}" for reason in refused)]) + "\n"


def _diff(before: Stage, name: str, text: str) -> str:
    old, new = (each.splitlines(keepends=True) for each in (before.text, text))
    return "".join(difflib.unified_diff(old, new, before.name, name))


def _ops(module: GraphModule) -> dict[str, int]:
    """Number of nodes by kind."""
    return dict(Counter(map(_op, module.graph.nodes)))


def _op(node: Node) -> str:
    if node.op == "call_method":
        return f".{node.target}"
    if node.op != "call_function":
        return node.op
    if node.target is FUNCTIONALIZED:
        return f"{node.args[0]} (functionalized)"
    return str(node.target) if isinstance(node.target, OpOverload) else function_of(node).__name__


def _written(module: GraphModule) -> int:
    """The number of caches, of keys or of values, that ``module`` appends to."""
    calls = module.graph.find_nodes(op="call_function", target=APPEND_LAYERS)
    return sum(len(tensors_argument(node, "x")) for node in calls) + len(
        module.graph.find_nodes(op="call_function", target=APPEND)
    )
