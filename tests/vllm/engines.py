"""Starts engines of vLLM."""

import json
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def started(job: dict, **environment: str) -> subprocess.CompletedProcess:
    """What a process with an engine of its own (`job.py`) came to."""
    command = [sys.executable, str(HERE / "job.py")]
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(command, input=json.dumps(job), capture_output=True, text=True, env={**kept, **environment})
