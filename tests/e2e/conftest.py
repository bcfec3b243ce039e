"""Cleaning up after projects with several processes."""

from collections.abc import Iterator

import pytest

from tests.runtime.project import close_consoles


@pytest.fixture(autouse=True)
def _consoles_are_closed() -> Iterator[None]:
    yield
    close_consoles()
