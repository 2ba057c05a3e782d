"""Test-wide settings. Property tests are derandomized: a failure today is the same failure tomorrow."""

import os

import pytest
import torch
from hypothesis import HealthCheck, settings

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when Triton is imported, which importing kvpass does

from common import only_reference
from fuzzing import outcomes

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


def pytest_addoption(parser):
    parser.addoption("--whole-zoo", action="store_true", help="every architecture with both attentions and caches")
    parser.addoption("--fuzz-examples", type=int, default=60, help="inputs that each test of `test_fuzz` tries")


@pytest.fixture
def fuzz(request, record_property):
    """``fuzz(what, strategy, attempt)`` is `fuzzing.outcomes`, whose counts are printed in the end."""

    def run(what, strategy, attempt, share=1.0):
        examples = max(1, round(share * request.config.getoption("--fuzz-examples")))
        record_property("fuzz", (what, dict(outcomes(strategy, attempt, examples))))

    return run


def pytest_terminal_summary(terminalreporter):
    """The counts of `test_fuzz` and the matrix of `test_zoo`, if they ran."""
    for report in terminalreporter.stats.get("passed", ()):
        for key, value in getattr(report, "user_properties", ()):
            if key == "fuzz":
                what, counts = value
                kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))
                terminalreporter.write_line(f"{what}: {sum(counts.values())} tried, {kinds}, 0 crashes")
    cells = {}
    for outcome in ("passed", "skipped", "failed"):
        for report in terminalreporter.stats.get(outcome, ()):
            for key, value in getattr(report, "user_properties", ()):
                if key == "zoo":
                    name, column, text = value
                    cells.setdefault(name, {})[column] = text if outcome != "failed" else "FAILED"
    if cells:
        columns = sorted({column for row in cells.values() for column in row}, reverse=True)
        terminalreporter.write_line("")
        terminalreporter.write_line(f"{'architecture':<20}" + "".join(f"{column:<24}" for column in columns))
        for name in sorted(cells):
            terminalreporter.write_line(f"{name:<20}" + "".join(f"{cells[name].get(c, ''):<24}" for c in columns))
