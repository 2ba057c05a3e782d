"""Terminal progress reporting: bars for long operations, and for compilation."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from tqdm import tqdm

INSTEAD = 'call kvpass.warmup to compile ahead of time, or pass lowering="eager" to compile nothing'
_STAGES = 5  # of a first step, roughly: trace, rewrite, layers, and the kernels of keys, values and attention

_here = threading.local()


def bar(what: str, total: int, unit: str, show: bool = True) -> tqdm:
    """A progress bar that disappears when it is done. There is none without ``show`` or without a terminal."""
    return tqdm(total=total, desc=what, unit=unit, disable=None if show else True, leave=False)


@contextmanager
def announced(what: str) -> Iterator[None]:
    """While ``what`` is compiled, show its progress and what to do instead of waiting. A nested call counts as a stage
    of the outer one."""
    if getattr(_here, "bar", None) is not None:
        stage(what)
        yield
        return
    text = f"kvpass compiles {what}, once: up to a minute, seconds in the next process ({INSTEAD})"
    look = "{desc}: {bar:10} {elapsed}{postfix}"
    with tqdm(total=_STAGES, desc=text, bar_format=look, disable=None, leave=False) as shown:
        _here.bar = shown
        try:
            yield
        finally:
            _here.bar = None


def stage(name: str) -> None:
    """Name the stage that begins now."""
    if (shown := getattr(_here, "bar", None)) is not None:
        shown.set_postfix_str(name, refresh=False)
        shown.n = min(shown.n + 1, _STAGES)
        shown.refresh()
