"""Fixtures for all tests of the coordinator."""

from __future__ import annotations

from tests.coordinator.postgres import postgres

__all__ = ["postgres"]
