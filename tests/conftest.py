"Markers, and a visible reason where a test cannot run."
import pytest


def pytest_configure(config):
    config.addinivalue_line("markers", "cuda: needs a CUDA device; skipped with the reason where there is none")
    config.addinivalue_line("markers", "slow: takes more than a few seconds; leave out with -m 'not slow'")


def pytest_collection_modifyitems(config, items):
    marked = [item for item in items if item.get_closest_marker("cuda")]
    if not marked: return
    import torch
    if torch.cuda.is_available(): return
    skip = pytest.mark.skip(reason=f"needs a CUDA device; torch {torch.__version__} sees none")
    for item in marked: item.add_marker(skip)
