"""Settings and fixtures for all tests. Property tests are derandomized, so a failing test fails in every run."""

import os
from collections import Counter
from fnmatch import fnmatchcase

import pytest
import torch
from hypothesis import HealthCheck, settings

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when Triton is imported, which importing kvpass does

os.environ.setdefault("KVPASS_COMPILE_PROCESSES", "0")  # tests share their cores

from kvpass.schemes import base

from common import only_reference, without_inductor
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
    """For a whole module, "auto" means the reference."""
    with only_reference():
        yield


@pytest.fixture
def nothing_compiled(request):
    """The reference runs all ops, and captured graphs run as the pass leaves them, except in tests marked
    ``compiles``."""
    if request.node.get_closest_marker("compiles"):
        yield
        return
    with only_reference(), without_inductor():
        yield


@pytest.fixture
def reference_in_this_test():
    """For one test, "auto" means the reference."""
    with only_reference():
        yield


@pytest.fixture
def registry(monkeypatch):
    """Schemes registered during the test are removed afterwards."""
    monkeypatch.setattr(base, "_SCHEMES", dict(base._SCHEMES))
    monkeypatch.setattr(base, "_PRESETS", dict(base._PRESETS))


def pytest_addoption(parser):
    parser.addoption("--whole-zoo", action="store_true", help="every architecture with both attentions and caches")
    parser.addoption("--whole", action="store_true", help="also tests marked nightly")
    parser.addoption("--field", action="store_true", help="every architecture of transformers (test_field.py)")
    parser.addoption(
        "--steps-by", default="pass", choices=("model", "pass", "inductor"), help="what runs its captured steps"
    )
    parser.addoption("--faults", type=int, default=4, help="lines at which each call of `test_faults` fails; 0 for all")
    parser.addoption("--fuzz-examples", type=int, default=60, help="inputs that each test of `test_fuzz` tries")


def pytest_collection_modifyitems(config, items):
    """Mark single cases, mark nightly tests as slow, and deselect both unless options ask for them."""
    left_out = []
    for item in items:
        for name in ("slow", "nightly"):
            if _case_is(item, f"{name}_cases"):
                item.add_marker(name)
        if item.get_closest_marker("nightly"):
            item.add_marker("slow")
            if not config.getoption("--whole"):
                left_out.append(item)
    if left_out:
        items[:] = [item for item in items if item not in left_out]
        config.hook.pytest_deselected(items=left_out)


def _case_is(item, mark: str) -> bool:
    """Whether a pattern of ``mark`` matches the parameters, in brackets, of a test's name."""
    case = item.callspec.id if hasattr(item, "callspec") else ""
    return any(fnmatchcase(case, pattern) for found in item.iter_markers(mark) for pattern in found.args)


@pytest.fixture
def fuzz(request, record_property):
    """``fuzz(what, strategy, attempt)`` runs `fuzzing.outcomes`. Its counts are printed at the end of the session."""

    def run(what, strategy, attempt, share=1.0):
        examples = max(1, round(share * request.config.getoption("--fuzz-examples")))
        record_property("fuzz", (what, dict(outcomes(strategy, attempt, examples))))

    return run


def pytest_terminal_summary(terminalreporter):
    """Print the counts of `test_fuzz` and the matrices of `test_zoo` and `test_faults`, if they ran."""
    for report in terminalreporter.stats.get("passed", ()):
        for key, value in getattr(report, "user_properties", ()):
            if key == "fuzz":
                what, counts = value
                kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))
                terminalreporter.write_line(f"{what}: {sum(counts.values())} tried, {kinds}, 0 crashes")
    cells, faults = {}, {}
    for outcome in ("passed", "skipped", "failed"):
        for report in terminalreporter.stats.get(outcome, ()):
            for key, value in getattr(report, "user_properties", ()):
                if key == "zoo":
                    name, column, text = value
                    cells.setdefault(name, {})[column] = text if outcome != "failed" else "FAILED"
                if key == "fault" and report.when == "call":
                    kind, call, _, found = value
                    faults.setdefault(f"{kind}: {call}", Counter()).update(found)
    _matrix(terminalreporter, "architecture", cells, 24)
    if terminalreporter.config.getoption("faults") != 6:
        _matrix(terminalreporter, "a call that fails", faults, 11)


def _matrix(terminalreporter, head: str, cells: dict[str, dict], width: int) -> None:
    if cells:
        columns = sorted({column for row in cells.values() for column in row}, reverse=True)
        first = max(map(len, (head, *cells))) + 1
        terminalreporter.write_line("")
        terminalreporter.write_line(f"{head:<{first}}" + "".join(f"{column:<{width}}" for column in columns))
        for name in sorted(cells):
            row = (f"{cells[name].get(column, '')!s:<{width}}" for column in columns)
            terminalreporter.write_line(f"{name:<{first}}" + "".join(row))
