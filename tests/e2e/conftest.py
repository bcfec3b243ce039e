"""Cleaning up after projects with several processes."""

from collections.abc import Iterator

import pytest

from tests.runtime.project import close_consoles, count_consoles


@pytest.fixture(autouse=True)
def _consoles_are_closed() -> Iterator[None]:
    """Those that a module's fixture has opened stay."""
    keep = count_consoles()
    yield
    close_consoles(keep)
