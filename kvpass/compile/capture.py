"""Report what Dynamo did with a call: whether it compiles at all, what broke a graph, and why a capture failed.

No other file queries Dynamo about this; ``tests/test_private_apis.py`` explains what it relies on.
"""

import os
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch._dynamo import config, eval_frame
from torch._dynamo.exc import BackendCompilerFailed, TorchDynamoException, Unsupported
from torch._dynamo.utils import counters
from torch.fx.experimental.symbolic_shapes import (
    ConstraintViolationError,
    GuardOnDataDependentSymNode,
    PendingUnbackedSymbolNotFound,
)

from ..errors import KVPassError, NotCapturedError

_DATA_DEPENDENT = "its control flow depends on the values of a tensor"
_SYMBOLIC = GuardOnDataDependentSymNode, PendingUnbackedSymbolNotFound
FAILURES = TorchDynamoException, ConstraintViolationError, *_SYMBOLIC
"""Exceptions that torch raises if it cannot capture or compile a function."""
_ADDED = "\n\nfrom user code:"  # Dynamo appends it to the messages of exceptions
_BREAKS = "graph_break", "unimplemented"


def switched_off() -> str:
    """Why ``torch.compile`` is turned off in this process; empty if it is not."""
    if os.environ.get("TORCHDYNAMO_DISABLE") == "1" or os.environ.get("TORCH_COMPILE_DISABLE") == "1":
        return "TORCHDYNAMO_DISABLE or TORCH_COMPILE_DISABLE is 1 in the environment"
    if config.disable:
        return "torch._dynamo.config.disable is set"
    return _stance() if eval_frame._stance.stance == "force_eager" else ""


def _stance() -> str:
    name = eval_frame._stance.stance
    return "" if name == "default" else f"torch.compiler.set_stance({name!r}) is in force"


def why_uncaptured(broken: Iterable[str]) -> str:
    """Why functions of the model ran uncompiled in a call whose graphs broke for the reasons ``broken``."""
    reasons = switched_off() or _stance() or "; ".join(dict.fromkeys(broken))
    return reasons or 'torch gives no reason: set TORCH_LOGS="graph_breaks" to see more'


class Breaks:
    """Reasons of graph breaks while `watching`, possibly including those of other threads."""

    def __init__(self) -> None:
        self._found: dict[str, None] = {}
        self._before: dict[str, Counter] | None = None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Collect reasons within this context."""
        self._before = {kind: Counter(counters[kind]) for kind in _BREAKS}
        try:
            yield
        finally:
            self.reasons()
            self._before = None

    def failed(self, reason: str) -> None:
        """Record that the graph could not be captured at all."""
        self._found = {reason: None}

    def reasons(self) -> list[str]:
        """The reasons collected so far."""
        if self._before is not None:
            for kind, before in self._before.items():
                new = (text for text, times in counters[kind].items() if times > before[text])
                self._found.update(dict.fromkeys(map(_shortened, new)))
        return list(self._found)


def translated(error: BaseException) -> KVPassError:
    """One of `FAILURES` as a sentence: the `KVPassError` that caused it, if kvpass refused something during capture,
    otherwise a `NotCapturedError`."""
    chain = list(_chain(error))
    if (own := next((each for each in chain if isinstance(each, KVPassError)), None)) is not None:
        own.args = (str(own).partition(_ADDED)[0], *own.args[1:])
        return own
    if any(isinstance(each, _SYMBOLIC) for each in chain):
        return NotCapturedError(_DATA_DEPENDENT + _where(chain))
    cause = error.inner_exception if isinstance(error, BackendCompilerFailed) else error
    if isinstance(cause, Unsupported):
        return NotCapturedError(_shortened(str(cause)) + _where(chain))
    if "data-dependent" in str(cause):
        return NotCapturedError(_DATA_DEPENDENT + _where(chain))
    return NotCapturedError(f"{_shortened(str(cause)) or type(cause).__name__}{_where(chain)}")


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """``error`` and the exceptions that it was raised from or during."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = getattr(error, "inner_exception", None) or error.__cause__ or error.__context__


def _shortened(text: str) -> str:
    """The first line and the explanation of a torch message, as one clause."""
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    if not lines:
        return ""
    explanation = next((line for line in lines if line.startswith("Explanation: ")), "").removeprefix("Explanation: ")
    return ": ".join(part.rstrip(".") for part in (lines[0], explanation) if part)


def _where(chain: list[BaseException]) -> str:
    """The line of the model, if torch names one."""
    for each in chain:
        stack = getattr(each, "real_stack", None)
        if stack:
            frame = stack[-1]
            return f" ({os.path.basename(frame.filename)}:{frame.lineno}, in {frame.name})"
    return ""
