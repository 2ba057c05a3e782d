"""Tests inside vLLM: `make test-vllm` makes an environment that has it. Without one they are not collected."""

from importlib.util import find_spec

import pytest

if find_spec("vllm.v1") is None if find_spec("vllm") else True:
    collect_ignore_glob = ["test_*.py"]


def pytest_collection_modifyitems(items):
    for item in items:
        item.add_marker(pytest.mark.vllm)
