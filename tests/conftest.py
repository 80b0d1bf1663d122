"""What every test runs under: one thread, repeatable property tests, uninitialised memory that
cannot pass for data."""

import importlib.util
import os
import sys

os.environ["OMP_NUM_THREADS"] = "1"  # for the processes that tests start
os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported; no test may reach for the network

import hypothesis
import pytest
import torch

from command_line import call as call  # a fixture
from tiny_runs import prepare_text

torch.set_num_threads(1)
with torch.device("meta"):
    torch.empty(0)  # torch notes once which functions a device context redirects: before they are replaced below
hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None)
hypothesis.settings.load_profile("repeatable")

HAS_TRITON = importlib.util.find_spec("triton") is not None
collect_ignore_glob = [] if HAS_TRITON else ["*/test_kernel_*.py"]


def pytest_configure(config):
    """Kernels run in Triton's interpreter, but in tests for a GPU. It is chosen before they are
    imported. Those in C are kept in pytest's own cache."""
    if hasattr(config, "cache"):
        os.environ.setdefault("LINEARTIME_CACHE", str(config.cache.mkdir("compiled")))
    if HAS_TRITON and config.option.markexpr != "gpu":
        import interpreter  # noqa: F401


def pytest_report_header():
    return None if HAS_TRITON else "Triton is not installed here: no kernel is tested"


UNINITIALISED = [(torch, "empty"), (torch, "empty_like"), (torch, "empty_strided"), (torch, "empty_permuted"),
                 (torch.Tensor, "new_empty"), (torch.Tensor, "new_empty_strided")]


@pytest.fixture(autouse=True, scope="session")
def poison():
    """Memory that the package asks for uninitialised holds NaN (an integer's least value, True), so
    that reading it before it is written fails a test. PyTorch does the same in deterministic mode,
    which changes more than that."""
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in UNINITIALISED:
            patch.setattr(owner, name, poisoned(getattr(owner, name)))
        yield


def poisoned(make):
    def made(*args, **kwargs):
        tensor = make(*args, **kwargs)
        if not torch.compiler.is_compiling():
            caller = sys._getframe(1).f_globals.get("__name__", "")
            if caller.split(".")[0] == "lineartime":
                number = tensor.is_floating_point() or tensor.is_complex()
                tensor.detach().fill_(float("nan") if number else
                                      True if tensor.dtype == torch.bool else torch.iinfo(tensor.dtype).min)
        return tensor
    return made


@pytest.fixture(scope="session")
def processes():
    """The process from which commands are forked, see `warm_command`."""
    from warm_command import WarmCommand

    warm = WarmCommand()
    yield warm
    warm.close()


@pytest.fixture(scope="session")
def warm_command(processes):
    """What stands for `python -m lineartime` and starts at once; see the helper of this name."""
    return processes.command


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """Prepared text for tests that only read it."""
    return prepare_text(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="session")
def masked_data(tmp_path_factory):
    """The same for masked language modelling."""
    return prepare_text(tmp_path_factory.mktemp("masked"), tokenizer="train", vocab_size=300, mlm=True)


@pytest.hookimpl(tryfirst=True)  # before marks choose what runs
def pytest_collection_modifyitems(items):
    """What measures is no part of the package: its tests are left to `make test-all`. The longest
    test comes first, which would otherwise run alone at the end."""
    for item in items:
        if item.nodeid.startswith("tests/benchmarks/"):
            item.add_marker(pytest.mark.rest)
    items.sort(key=lambda item: "test_kernel_resources" not in item.nodeid)
