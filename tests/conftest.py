import getpass
import os
import tempfile

import pytest
import torch
from hypothesis import HealthCheck, settings

# code that was compiled for AVX-512 gives wrong numbers where a lesser CPU is imitated, and the cache does not tell
_CODE = os.path.join(tempfile.gettempdir(), f"inductor-{getpass.getuser()}-{torch.backends.cpu.get_cpu_capability()}")
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", _CODE)
torch.set_num_threads(1)  # the problems are small, and the tests run in parallel

quiet = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow, HealthCheck.filter_too_much]}
settings.register_profile("default", max_examples=40, derandomize=True, **quiet)
settings.register_profile("wide", max_examples=400, **quiet)
settings.register_profile("fuzz", max_examples=2000, **quiet)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture
def double():
    """float64 for everything that is made in the test."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)
