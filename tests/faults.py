"""Make calls fail at their n-th step: the line of kvpass that runs then raises an out-of-memory error or an
interrupt."""

import linecache
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import torch

import kvpass

OURS = tuple(str(Path(module.__file__).parent) for module in (kvpass, kvpass.lowering))
ERRORS = {"no memory": torch.OutOfMemoryError, "interrupt": KeyboardInterrupt}


class Steps:
    """Counts lines of kvpass as they run. Line number ``fatal`` raises ``error`` instead.

    If that is a ``with`` statement, the next line raises: tracing also reports it when its block ends, and an error
    raised there would skip its exit, such as the release of a lock. Neither a signal nor a lack of memory does that.
    """

    def __init__(self, fatal: int = 0, error: type[BaseException] = KeyboardInterrupt):
        self.fatal, self.error, self.count, self.where = fatal, error, 0, ""

    def _in_frame(self, frame, event, _):
        if event == "line":
            self.count += 1
            if 0 < self.fatal <= self.count and not self.where and not _at_with(frame):
                self.where = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
                raise self.error(f"step {self.fatal}, {self.where}")
        return self._in_frame

    def _called(self, frame, event, _):
        return self._in_frame if frame.f_code.co_filename.startswith(OURS) else None

    @contextmanager
    def counting(self) -> Iterator["Steps"]:
        before = sys.gettrace()
        sys.settrace(self._called)
        try:
            yield self
        finally:
            sys.settrace(before)


def _at_with(frame: FrameType) -> bool:
    """Whether ``frame`` is at a ``with`` statement."""
    return linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip().startswith("with ")


def outcomes(
    fresh: Callable[[], object],
    call: Callable[[object], None],
    verdict: Callable[[object], str],
    error: type[BaseException],
    most: int | None = None,
    seed: int = 0,
) -> Counter:
    """Run ``call`` on a ``fresh()`` object, make it fail with ``error`` at each of its steps (or at ``most`` of them,
    chosen by ``seed``), and count the ``verdict`` on the object."""
    thing = fresh()
    with Steps().counting() as whole:
        call(thing)
    steps, found = range(1, whole.count + 1), Counter()
    for fatal in steps if most is None or most >= len(steps) else random.Random(seed).sample(steps, most):
        thing, failing = fresh(), Steps(fatal, error)
        try:
            with failing.counting():
                call(thing)
        except error:
            found[verdict(thing)] += 1
        else:
            if failing.where:  # it did raise
                found[f"swallowed at {failing.where}"] += 1
    return found
