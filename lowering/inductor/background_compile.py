"""Compiles kernels in other processes while this one runs a prompt and traces.

Most of a first step is Python, so a second thread would have to wait for it. The kernels are read from the store on
disk (`kernel_store`). A kernel that another process fails to compile is compiled in this process.
"""

import atexit
import logging
import os
import pickle
import subprocess
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from threading import Event, Thread
from typing import Any

import torch
from torch._inductor import config

from kvpass.errors import KVPassError

from . import kernel_store

logger = logging.getLogger("kvpass.lowering")

SWITCH = "KVPASS_COMPILE_PROCESSES"
"""Environment variable: the number of processes that may be started; 0 for none."""

_MOST = 3
_pending: dict[Path, Event] = {}

Job = tuple[str, tuple]
"""The name of a `kvpass.lowering.inductor.aot.Kernel`, and a key for it."""


def _processes(jobs: int) -> int:
    """Number of processes to start. One of torch's threads is left to this process. Raises `KVPassError` if the
    environment variable is not a number."""
    allowed = os.environ.get(SWITCH, "")
    if allowed and not allowed.isdecimal():
        raise KVPassError(
            f"{SWITCH}={allowed!r} must be the number of processes that may compile kernels; otherwise leave it unset."
        )
    return min(jobs, int(allowed) if allowed else min(_MOST, torch.get_num_threads() - 1))


def start(device: torch.device, jobs: Sequence[Job]) -> None:
    """Start processes that compile ``jobs`` for ``device``, except for jobs whose kernels are already stored."""
    wanted = []
    for name, key in jobs:
        place = kernel_store.place_of(device, name, *key)
        if place is not None and not place.exists() and place not in _pending:
            wanted.append((place, name, key))
    count = _processes(len(wanted)) if sys.executable else 0
    for i in range(count):
        _start(wanted[i::count])


def _start(wanted: Sequence[tuple[Path, str, tuple]]) -> None:
    for place, *_ in wanted:
        _pending[place] = Event()
    command = [sys.executable, "-c", f"from {__name__} import main; main()"]
    environment = {**os.environ, SWITCH: "0", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    pipes: dict[str, Any] = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    try:
        process = subprocess.Popen(command, env=environment, **pipes)
    except OSError as error:
        _end(wanted, error)
        return
    atexit.register(process.kill)
    Thread(target=_follow, args=(process, wanted), name="kvpass.compile", daemon=True).start()


def _follow(process: subprocess.Popen, wanted: Sequence[tuple[Path, str, tuple]]) -> None:
    """Send ``process`` its jobs, and set the event of each job when it is done or cannot be done."""
    try:
        settings = torch.get_num_threads(), torch.get_default_dtype(), config.save_config_portable()
        process.stdin.write(pickle.dumps((settings, [job for _, *job in wanted])))
        process.stdin.close()
        for place, line in zip([place for place, *_ in wanted], process.stdout, strict=False):
            logger.info("%s: %s", place.name, line.decode().strip())
            _pending[place].set()
        _end(wanted)
    except Exception as error:  # the process may be killed, and settings may not be picklable
        _end(wanted, error)
    finally:
        process.kill()
        process.wait()
        atexit.unregister(process.kill)


def _end(wanted: Sequence[tuple[Path, str, tuple]], error: Exception | None = None) -> None:
    """Release all waiters for ``wanted``: no process works on these jobs any more."""
    if error is not None:
        logger.info("Kernels are not compiled in another process: %r", error)
    for place, *_ in wanted:
        _pending.pop(place).set()


def wait(place: Path) -> None:
    """Wait until the kernel is stored at ``place``, or no other process is compiling it."""
    if (event := _pending.get(place)) is not None:
        event.wait()


def main() -> None:
    """Entry point of a compile process: reads jobs from stdin, compiles them, and writes a line for each."""
    (threads, dtype, settings), jobs = pickle.load(sys.stdin.buffer)
    torch.set_num_threads(threads)
    torch.set_default_dtype(dtype)
    config.load_config(settings)
    for name, key in jobs:
        module, kernel = name.rsplit(".", 1)
        getattr(import_module(module), kernel)(*key)
        print("compiled", flush=True)
