"""Start vLLM engines."""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

HERE = Path(__file__).parent


def started(job: dict, **environment: str) -> subprocess.CompletedProcess:
    """The result of a process with its own engine (`job.py`). Triton's interpreter is on only if ``environment`` says
    so."""
    command = [sys.executable, str(HERE / "job.py")]
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(command, input=json.dumps(job), capture_output=True, text=True, env={**kept, **environment})


def additional(scheme) -> dict:
    """The engine argument that selects ``scheme``."""
    return {"additional_config": {"kvpass": scheme}}


def stored(scheme, **extra) -> dict:
    """The engine argument that keeps prefixes by ``scheme``."""
    connector = {"kv_connector": "KVPassConnector", "kv_connector_module_path": "kvpass.vllm", "kv_role": "kv_both"}
    return {"kv_transfer_config": connector | {"kv_connector_extra_config": {"scheme": scheme, **extra}}}


@contextmanager
def server(model, scheme: str, log: Path) -> Iterator[str]:
    """The address of vLLM's own server, as soon as it answers."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--port", str(port)]
    command += ["--max-model-len", "1024", "--max-num-batched-tokens", "512", "--enforce-eager", "--dtype", "float32"]
    command += ["--kv-cache-memory-bytes", str(1 << 28)]
    command += ["--additional-config", json.dumps(additional(scheme)["additional_config"])]
    address, offline = f"http://localhost:{port}", {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env={**os.environ, **offline})
    try:
        while not _answers(f"{address}/health"):
            assert process.poll() is None, log.read_text()[-4000:]
            time.sleep(1)
        yield address
    finally:
        process.terminate()
        process.wait()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except OSError:
        return False
