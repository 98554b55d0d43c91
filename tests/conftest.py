import gc
import getpass
import os
import platform
import shutil
import tempfile
import warnings
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings
from torch import nn

pytest.register_assert_rewrite("contract", "handle", "plain_loop", "problems")

from contract import ENGINES, EVERY_PULLBACK
from problems import weighted

import bilevel_plugin as bilevel
from bilevel_plugin.pullback import PULLBACKS, lean
from bilevel_plugin.pullback.lean import LeanProducts

# code that was compiled for AVX-512 gives wrong numbers where a lesser CPU is imitated, and the cache does not tell
_CODE = os.path.join(tempfile.gettempdir(), f"inductor-{getpass.getuser()}-{torch.backends.cpu.get_cpu_capability()}")
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", _CODE)
torch.set_num_threads(1)  # the problems are small, and the tests run in parallel

quiet = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow, HealthCheck.filter_too_much]}
settings.register_profile("default", max_examples=40, derandomize=True, **quiet)
settings.register_profile("wide", max_examples=400, **quiet)
settings.register_profile("fuzz", max_examples=2000, **quiet)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))

# these need the recipes, the site, the benchmarks or the peers; the rest runs with torch, numpy, pytest and hypothesis
_BEYOND_THE_CORE = {
    "test_architecture.py",
    "test_benchmarks.py",
    "test_benchmarks_cleaning.py",
    "test_docs.py",
    "test_front.py",
    "test_gpu_check.py",
    "test_peers.py",
    "test_peers_matrix.py",
    "test_site.py",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--core", action="store_true", help="only tests that need torch, numpy and hypothesis alone")
    parser.addoption("--newer", action="store_true", help="Python or torch is newer than in constraints.txt")


def pytest_configure(config: pytest.Config) -> None:
    """Warnings are errors with the versions of constraints.txt; newer ones may say what they will drop some day."""
    if config.getoption("--newer"):
        for kind in ("DeprecationWarning", "PendingDeprecationWarning", "FutureWarning", "UserWarning:torch"):
            config.addinivalue_line("filterwarnings", f"default::{kind}")


def pytest_collection_finish() -> None:
    """What was imported stays: a `gc.collect()` in a test need not walk through it again, which takes half a second."""
    gc.collect()
    gc.freeze()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    beyond = collection_path.name in _BEYOND_THE_CORE or collection_path.parent.name in ("recipes", "loops")
    return True if config.getoption("--core") and beyond else None


@pytest.fixture
def transformers():
    """Hugging Face's package, whose own imports warn."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("transformers", reason="transformers is not installed")


@pytest.fixture
def blocks():
    """For tests of `Reverse(blocks=…)`."""
    from bilevel_plugin.autograd.look import hooks_on_saved

    if hooks_on_saved is None:
        pytest.skip(f"torch {torch.__version__} does not tell of hooks on saved tensors, so that blocks= is off")


@pytest.fixture
def compiler(monkeypatch):
    """For tests of compiled steps. Inductor takes seconds for each graph: here graphs run as they were traced.

    `make fuzz` runs them with Inductor, and so does a test that takes the fixture of that name as well.
    """
    from torch._dynamo import config, is_dynamo_supported, lookup_backend

    from bilevel_plugin.pullback import compiled

    if not hasattr(config, "trace_autograd_ops"):
        pytest.skip(f"the compiler of torch {torch.__version__} can't trace torch.autograd.grad")
    if not is_dynamo_supported():
        pytest.skip(f"torch {torch.__version__} has no compiler for Python {platform.python_version()} here")
    if "HYPOTHESIS_PROFILE" not in os.environ:
        monkeypatch.setattr(compiled, "lookup_backend", lambda _: lookup_backend("aot_eager"))


@pytest.fixture
def inductor(compiler, monkeypatch):
    """Compiled code, as users get it."""
    if not any(map(shutil.which, ("c++", "g++", "clang++", "cl"))):
        pytest.skip("no C++ compiler on this machine, which Inductor needs")
    from torch._dynamo import lookup_backend

    monkeypatch.setattr("bilevel_plugin.pullback.compiled.lookup_backend", lookup_backend)


@pytest.fixture(scope="module")
def browser():
    """A Chromium, driven by playwright."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if chromium is None:
        pytest.skip("no Chromium on this machine (Debian: apt-get install chromium)")
    options = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"]
    with sync_api.sync_playwright() as p:
        browser = p.chromium.launch(executable_path=chromium, args=options)
        yield browser
        browser.close()


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture(params=ENGINES.values(), ids=ENGINES)
def engine(request):
    """Every engine that is exact after any number of steps."""
    return request.param


@pytest.fixture(params=EVERY_PULLBACK)
def pullback(request, monkeypatch):
    """Every pullback: its name, and an engine that differentiates each step by it."""
    if request.param == "compiled":
        request.getfixturevalue("compiler")
        return "compiled", bilevel.Reverse(compile=True)
    if request.param == "blocks":
        request.getfixturevalue("blocks")
    monkeypatch.setitem(PULLBACKS, "lean", PULLBACKS[request.param])  # the one that Reverse takes
    monkeypatch.setattr(lean, "LARGE", 0)  # products of small models, too
    return request.param, bilevel.Reverse()


@pytest.fixture
def double():
    """float64 for everything that is made in the test."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def single(double):
    """float32 again, in a file whose other tests are in float64."""
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def parts(double):
    """Model, h, g, λ, x and y of data cleaning with six samples."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    x, y = torch.randn(6, 3), torch.randint(2, (6,))
    lam = torch.zeros(6, requires_grad=True)

    h, g = weighted(lam)
    return model, h, g, lam, x, y


@pytest.fixture
def left_out(monkeypatch):
    """The number of weights whose gradient was left out, for every step that the lean pullback went through."""
    counts = []

    class Counted(LeanProducts):
        @contextmanager
        def taking_gradient(self):
            with super().taking_gradient():
                yield
            counts.append(len(self.without_value))

    monkeypatch.setattr(lean, "LeanProducts", Counted)
    return counts
