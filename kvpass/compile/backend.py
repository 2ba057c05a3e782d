"""The backend that kvpass hands to torch.compile: the pass, then Inductor."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from torch._inductor import config as inductor_config
from torch._inductor import list_mode_options
from torch._inductor.compile_fx import compile_fx
from torch.fx import GraphModule

from kvpass.lowering.inductor.aot import unprobed
from kvpass.lowering.session import compiling

from ..errors import KVPassError, NotFusedError
from ..progress import stage
from .device_lengths import counted_on_host, read_on_device
from .find import find
from .lower import lower
from .normalise import normalise
from .own_cache import presents
from .reads import count
from .recorded_calls import Counted, Noted
from .repeats import Repeats, find_repeats
from .report import ADVICE, GraphReport, listed
from .rewrite import rewrite, unfused
from .stamp import Stamp
from .subclasses import Unwrapped, flatten, has_subclass, unwrapped
from .trace import Trace, trace_folder

_MODES = (None, "default", "reduce-overhead")
# Dynamo's guards have already checked the inputs, some hundreds per step. Values used twice are computed once, so that
# the layers of a model share their kernels and rotary tables are not recomputed in each.
_INDUCTOR = {"reorder_for_locality": False, "size_asserts": False, "realize_reads_threshold": 0}


@dataclass
class Backend:
    """Compiles one captured graph: normalise -> find -> rewrite -> lower -> Inductor.

    strict: raise `NotFusedError` if a cache read was not fused.
    lowering: "auto" or the name of an implementation.
    interpret: run the rewritten graph without Inductor (for prefill, to shorten the time to the first token).
    mode: mode of torch.compile (see `check_mode`). With CUDA graphs, the parts between cache ops are captured.
    device_lengths: read lengths on the device, so that a step can be captured as one CUDA graph.
    noted: record calls of compiled functions, for replaying them (`kvpass.compile.recorded_calls`).
    folder: where the stages of each graph are written (see `Trace`).
    keep_stages: whether ``graphs`` keep their stages (see `Trace`).
    """

    strict: bool = False
    lowering: str = "auto"
    interpret: bool = False
    mode: str | None = None
    device_lengths: bool = False
    noted: bool = False
    graphs: list[GraphReport] = field(default_factory=list)
    folder: Path | None = field(default_factory=trace_folder)
    keep_stages: bool = False

    def __call__(self, gm: GraphModule, example_inputs) -> Callable:
        if has_subclass(example_inputs):
            return Unwrapped(self(unwrapped(gm), flatten(example_inputs)), example_inputs)
        examples = [node.meta.get("example_value") for node in gm.graph.find_nodes(op="placeholder")]
        with Trace(gm, self.folder, self.keep_stages) as trace:
            run = self._compile(gm, example_inputs, trace)
        if trace.report is not None and trace.report.reads:
            run = Counted(run, trace.report)
        return Noted(run, examples) if self.noted else run

    def _compile(self, gm: GraphModule, example_inputs, trace: Trace) -> Callable:
        repeats = find_repeats(gm) if self.mode is None else f"mode={self.mode!r}"
        if isinstance(repeats, Repeats):
            taken = [example_inputs[i] for i in repeats.kept] + repeats.examples
            passed = self._pass(repeats.module, taken, trace, repeats)
            if passed is not None:
                return passed
            trace.restart()
            repeats = "the pass cannot separate its layers, or some are not fused"
        run = self._pass(gm, example_inputs, trace)
        trace.report.whole = repeats
        return run

    def _pass(self, gm: GraphModule, inputs: list, trace: Trace, repeats: Repeats | None = None) -> Callable | None:
        """A function that runs ``gm``, or the graph cut down to its first repeat. None if that graph has to be compiled
        as a whole."""
        stage("rewriting it")
        normal = normalise(gm)
        trace.stage("normalised", normal.module)
        attentions, refused = find(normal.graph, presents(normal.graph))
        trace.stage("found", normal.module, attentions, refused)
        why = unfused(normal.graph, attentions, refused)
        stamp = None if repeats is None else Stamp(normal.module, repeats)
        if stamp and (why or refused):
            return None
        module = rewrite(normal, inputs, attentions, refused)
        on_host = read_on_device(module.graph) if self.device_lengths else []
        trace.stage("rewritten", module)
        stamp = None if repeats is None else Stamp(module, repeats)
        if stamp and not stamp.possible:
            return None
        times = stamp.times if stamp else lambda node: 1
        counts = count(module, times)
        report = trace.report = GraphReport(refused=refused, compiled=not self.interpret, **counts)
        if stamp:
            report.repeats = repeats.count
        if report.decoded and not refused:
            refused.append("a cache is read by something other than SDPA or a softmax between two matrix products")
            why = dict.fromkeys(why, refused[0])
        report.unfused = why
        if self.strict and refused:
            raise NotFusedError(
                f"strict=True: {max(report.decoded, len(refused))} cache reads not fused: {listed(refused)}. {ADVICE} "
                "Without strict=True kvpass dequantizes them first."
            )
        report.lowerings = lower(module, self.lowering)
        report.on_host = [*on_host, *counted_on_host(module)] if self.device_lengths else None
        trace.stage("lowered", module)
        if report.reads:
            self.graphs.append(report)
        run = stamp.compiled(self._compiled) if stamp else self._compiled(module, normal.inputs)
        if not self.interpret:
            trace.stage("compiled")
        return run

    def _compiled(self, module: GraphModule, inputs: list) -> Callable:
        """A compiled function for ``module`` and inputs like the fake ``inputs``."""
        if self.interpret:
            module.recompile()
            return module.forward
        stage("compiling its layers")
        options = list_mode_options(self.mode) if self.mode else {}
        with compiling(), inductor_config.patch({**options, **_INDUCTOR, **unprobed()}):
            run = compile_fx(module, inputs)
        if not callable(run):
            raise TypeError(f"Inductor returned {run!r}, where a function is expected.")
        return run


def check_mode(mode: str | None) -> None:
    """Raise `KVPassError` for modes of torch.compile that kvpass does not pass on to Inductor."""
    if mode not in _MODES:
        raise KVPassError(f"mode={mode!r} is not supported: use 'reduce-overhead', or leave it out.")
