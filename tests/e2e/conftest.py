"""How long the longest of these tests go on."""

from __future__ import annotations

import pytest

from tests.coordinator.postgres import postgres

__all__ = ["postgres"]

SOAK_S, KILLS = 120.0, 200


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--soak-s", type=float, default=SOAK_S, help="Seconds for which the soak test watches a run.")
    parser.addoption("--kills", type=int, default=KILLS, help="Deaths in the run of many deaths.")


@pytest.fixture(scope="session")
def soak_s(pytestconfig: pytest.Config) -> float:
    """Seconds of soak. Without this folder on the command line pytest knows of no option, and the default holds."""
    return float(pytestconfig.getoption("--soak-s", SOAK_S))


@pytest.fixture(scope="session")
def n_kills(pytestconfig: pytest.Config) -> int:
    return int(pytestconfig.getoption("--kills", KILLS))
