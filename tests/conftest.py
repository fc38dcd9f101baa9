"""What every test shares: one thread, float64 truth, and slow tests only when asked for."""

from __future__ import annotations

import pytest
import torch

torch.set_num_threads(1)


def pytest_configure(config: pytest.Config) -> None:
    """Name the markers."""
    config.addinivalue_line("markers", "slow: takes minutes; run with -m slow")
    config.addinivalue_line("markers", "long: more of what slow tests do; run with -m long")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave slow tests out unless an expression of markers was given, long ones unless named."""
    asked = config.getoption("-m")
    for item in items:
        if "long" in item.keywords and "long" not in asked:
            item.add_marker(pytest.mark.skip(reason="long: run with -m long"))
        elif "slow" in item.keywords and not asked:
            item.add_marker(pytest.mark.skip(reason="slow: run with -m slow"))


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """The same draws in every order and on every worker."""
    torch.manual_seed(0)
