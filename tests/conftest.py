"""Settings that every test runs under."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # Two workers on two cores; set before torch starts its threads.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # Read when a kernel is defined.


@pytest.fixture
def uninitialised_is_nan():
    """What torch.empty gives is otherwise mostly old, harmless numbers."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device; torch sees none"))
