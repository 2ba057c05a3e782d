"""Test-wide settings. Property tests are derandomized: a failure today is the same failure tomorrow."""

import os

import pytest
import torch
from hypothesis import HealthCheck, settings

from common import only_reference

settings.register_profile(
    "kvpass",
    derandomize=True,
    deadline=None,
    max_examples=30,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("kvpass")

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def reference_lowering():
    """For a whole module: "auto" means the reference."""
    with only_reference():
        yield


@pytest.fixture
def reference_in_this_test():
    """For one test: "auto" means the reference."""
    with only_reference():
        yield
