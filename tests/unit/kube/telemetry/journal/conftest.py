"""A spool with its store, for all tests of segments."""

from pathlib import Path

import pytest

from journal_shipping import Shipping


@pytest.fixture
def shipping(tmp_path: Path) -> Shipping:
    return Shipping(tmp_path)
