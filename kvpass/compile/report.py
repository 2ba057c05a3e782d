"""What the pass did, in words and numbers, for `kvpass.explain`."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

ADVICE = "Other ways to write attention may be supported: load the model with attn_implementation='sdpa' or 'eager'."


def listed(reasons: Iterable[str]) -> str:
    """``reasons`` in one line, without duplicates."""
    return "; ".join(dict.fromkeys(reasons))


@dataclass(frozen=True)
class Stage:
    """A captured graph after one stage of the pass.

    name: "captured" by Dynamo, "normalised", "found", "rewritten", "lowered", or "compiled" by Inductor, which leaves
        no graph.
    text: the graph as code.
    diff: the changes of the stage, as a unified diff.
    ops: number of nodes by kind.
    seconds: time that the stage took; 0 for Dynamo's part.
    """

    name: str
    text: str
    diff: str
    ops: dict[str, int]
    seconds: float

    def __str__(self) -> str:
        nodes = f" {sum(self.ops.values())} nodes" if self.ops else ""
        return f"{self.name}{nodes}" + (f" in {1e3 * self.seconds:,.0f} ms" if self.seconds else "")


@dataclass
class GraphReport:
    """One captured graph: the attentions over packed state found in it, and whether they were fused.

    fused: number of layers whose attention over the cache was replaced.
    reconstructed: how many of them are dequantized first, because the next layer is predicted from it, its heads are
        read in another order, or its tokens have individual bit widths.
    decoded: number of other reads that dequantize first.
    rotated: number of key caches stored before rotary embedding and rotated when read.
    unfused: position among the packed layers -> the reason.
    repeats: how often the layers' common part, compiled once, is called; 0 if the graph was compiled as a whole.
    whole: why the graph was compiled as a whole.
    is_piece: whether a step consists of more than this graph.
    stages: the stages of the pass, if `kvpass.explain` asked for them beforehand.
    """

    fused: int
    reconstructed: int
    decoded: int
    rotated: int
    refused: list[str]
    compiled: bool
    lowerings: dict[str, str] = field(default_factory=dict)
    unfused: dict[int, str] = field(default_factory=dict)
    repeats: int = 0
    whole: str = ""
    on_host: list[str] | None = None
    stages: list[Stage] = field(default_factory=list)
    is_piece: bool = False

    @property
    def reads(self) -> bool:
        """Whether it reads a packed cache at all."""
        return bool(self.fused or self.decoded)

    def __str__(self) -> str:
        kind = "compiled" if self.compiled else "interpreted"
        used = ", ".join(f"{op}: {name}" for op, name in sorted(self.lowerings.items()))
        used = f"; {used}" if used else ""
        rotated = f", {self.rotated} keys rotated when read" if self.rotated else ""
        rebuilt = f" ({self.reconstructed} over a dequantized cache)" if self.reconstructed else ""
        kind += f", shared by {self.repeats} repeats of the same layers" if self.repeats else ""
        kind += f" as a whole: {self.whole}" if self.compiled and self.whole else ""
        return (
            f"graph ({kind}): {self.fused} attentions fused{rebuilt}, {self.decoded} reads dequantized{rotated}{used}"
        )


@dataclass
class LayerReport:
    """One layer of the model: packed or why not, and its bytes in the cache last used. ``nbytes`` does not include
    originals in host memory; ``moved_nbytes`` have been fetched from there."""

    index: int
    packed: bool
    plan: str
    reason: str = ""
    nbytes: int = 0
    full_nbytes: int = 0
    host_nbytes: int = 0
    moved_nbytes: int = 0


@dataclass(frozen=True)
class StepInPieces:
    """A decode step that is not one graph.

    graphs: number of graphs that read packed layers.
    fused, decoded: as in `GraphReport`, over those graphs.
    uncaptured: indices of the layers that the model's own Python reads.
    why: torch's reason.
    """

    graphs: int
    fused: int
    decoded: int
    uncaptured: tuple[int, ...]
    why: str

    def __str__(self) -> str:
        if not self.graphs:
            return (
                f"steps are not compiled: {self.why}\n  keys and values are dequantized before attention: correct, but "
                "slower"
            )
        counts = f"{self.fused} attentions fused, {self.decoded} reads dequantized"
        rest = f", {len(self.uncaptured)} layers outside any graph" if self.uncaptured else ""
        return f"steps are not one graph: {self.why}\n  a step ran {self.graphs} graphs: {counts}{rest}"


@dataclass
class Report:
    """A printable report. Tests also use it to make sure that kvpass really ran."""

    scheme: str
    layers: list[LayerReport]
    graphs: list[GraphReport] = field(default_factory=list)
    tokens: int = 0
    batch: int = 0
    calibration: str = ""
    calibration_nbytes: int = 0
    simulated: bool = False
    attention: str = ""
    keeps_stages: bool = False
    recalled: bool = False
    not_replayed: str = ""
    hooked_steps: int = 0
    hooked: str = ""
    pieces: StepInPieces | None = None
    uncaptured_prompt: str = ""
    instead_of: str = ""
    eager: bool = False
    long_prompts: str = ""

    def stepped(self, ran: Sequence[GraphReport], uncaptured: Sequence[int], why: Callable[[], str]) -> bool:
        """Record a decode step that ran these graphs, and these layers outside of any graph. ``why`` gives the reason
        if it was not one graph. Returns whether this is new."""
        if len(ran) < 2 and not uncaptured:
            self.pieces = None if ran else self.pieces
            return False
        for graph in ran:
            graph.is_piece = True
        fused, decoded = (sum(getattr(graph, name) for graph in ran) for name in ("fused", "decoded"))
        counts = len(ran), fused, decoded, tuple(uncaptured)
        before = self.pieces
        if before is not None and (before.graphs, before.fused, before.decoded, before.uncaptured) == counts:
            return False
        self.pieces = StepInPieces(*counts, why())
        return before is None

    def used(self, layers: list[LayerReport], tokens: int, batch: int) -> None:
        """Record the size of the cache last used. All fields are set at once, because other threads use other
        caches."""
        vars(self).update(layers=layers, tokens=tokens, batch=batch)

    @property
    def packed(self) -> int:
        """Number of layers whose cache is packed."""
        return sum(layer.packed for layer in self.layers)

    @property
    def fused(self) -> int:
        """Number of attention layers that decode steps fuse (the minimum, if steps differ); 0 before the first step."""
        counts = [graph.fused for graph in self.graphs if graph.compiled and not graph.is_piece]
        return min(counts if self.pieces is None else [*counts, self.pieces.fused], default=0)

    @property
    def nbytes(self) -> int:
        """Bytes of all layers in the cache last used, plus the bytes of the calibration."""
        return sum(layer.nbytes for layer in self.layers) + self.calibration_nbytes

    @property
    def full_nbytes(self) -> int:
        """Bytes of the same tokens in full precision, in the cache's dtype."""
        return sum(layer.full_nbytes for layer in self.layers)

    def why_not_fused(self, layer: LayerReport) -> str:
        """Why the attention of a packed layer is not fused in a compiled graph; empty if it is."""
        if self.pieces is not None:
            return self.pieces.why if layer.index in self.pieces.uncaptured else ""
        position = [row.index for row in self.layers if row.packed].index(layer.index)
        graphs = [graph for graph in self.graphs if graph.compiled and not graph.is_piece]
        return next((graph.unfused[position] for graph in graphs if position in graph.unfused), "")

    def _status(self, layer: LayerReport) -> str:
        if self.simulated:
            return "simulated"
        if not layer.packed:
            return "full precision"
        if self.why_not_fused(layer):
            return "packed, not fused"
        if self.pieces is not None:
            return "packed, in pieces" if self.pieces.decoded else "packed, fused"
        return "packed, fused" if any(graph.compiled for graph in self.graphs) else "packed"

    def _stages(self, graph: GraphReport) -> list[str]:
        if graph.stages:
            return [f"  stages: {', '.join(map(str, graph.stages))}"]
        return (
            ["  stages: not recorded, this graph was captured before you asked for them"] if self.keeps_stages else []
        )

    def __str__(self) -> str:
        lines = [f"kvpass {self.scheme}: {self.packed} of {len(self.layers)} cache layers packed"]
        lines.append(f"{'layer':>5}  {'status':<18} {'bytes now':>12} {'full precision':>15}  plan")
        for layer in self.layers:
            lines.append(
                f"{layer.index:>5}  {self._status(layer):<18} {layer.nbytes:>12,} {layer.full_nbytes:>15,}  "
                f"{layer.plan or layer.reason}"
            )
            if layer.packed and (why := self.why_not_fused(layer)):
                lines.append(f"{'':>7}not fused: {why}")
        if self.simulated:
            lines.append(
                "simulated: the model has no cache, so no memory is saved; attention is computed as if over a packed "
                "cache"
            )
            return "\n".join(lines + [line for graph in self.graphs for line in self._stages(graph)])
        share = f" ({self.nbytes / self.full_nbytes:.3f}x)" if self.full_nbytes else ""
        lines.append(
            f"total: {self.nbytes:,} bytes for {self.tokens} tokens x batch {self.batch}, "
            f"full precision {self.full_nbytes:,}{share}"
        )
        if host := sum(layer.host_nbytes for layer in self.layers):
            moved = sum(layer.moved_nbytes for layer in self.layers)
            lines.append(f"originals in host memory: {host:,} bytes, {moved:,} bytes fetched so far")
        if self.attention:
            lines.append(self.attention)
        if self.long_prompts:
            lines.append(self.long_prompts)
        if self.calibration:
            lines.append(f"calibrated: {self.calibration}")
        if self.recalled:
            lines.append("replayed steps skip Dynamo's per-step guard checks")
        if self.not_replayed:
            lines.append(f"steps are not replayed: {self.not_replayed}")
        if self.instead_of:
            lines.append(f"the default scheme does not work for this model: {self.instead_of}")
        if self.uncaptured_prompt:
            lines.append(f"a prompt ran without a captured graph: correct, but slower: {self.uncaptured_prompt}")
        if self.hooked_steps:
            lines.append(
                f"{self.hooked_steps} steps were not compiled, because of hooks on {self.hooked}: correct, but slower"
            )
        if self.pieces is not None:
            lines.append(str(self.pieces))
        elif self.eager:
            lines.append(
                "lowering='eager': steps are not compiled; attention that is not SDPA dequantizes keys and values first"
            )
        elif not self.graphs and not self.hooked_steps:
            lines.append("no graph captured yet: kvpass decides about fusion in the first decode step")
        for graph in self.graphs:
            lines.append(str(graph))
            others = (reason for reason in graph.refused if not graph.compiled or reason not in graph.unfused.values())
            lines.extend(f"  not fused ({times}x): {reason}" for reason, times in Counter(others).items())
            if graph.refused:
                lines.append(
                    f"  without fusion, keys and values are dequantized before attention: correct, but slower. {ADVICE}"
                )
            if graph.compiled and graph.on_host is not None:
                reasons = listed(graph.on_host)
                lines.append(f"  not replayed: {reasons}" if reasons else "  replayed as one CUDA graph")
            lines += self._stages(graph)
        return "\n".join(lines)
