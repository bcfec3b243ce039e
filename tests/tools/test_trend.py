"""What the soak calls growth."""

from tools.soak.trend import trend

HOUR = 3_600


def samples(*sizes: float) -> list[tuple[float, float]]:
    """Return samples that are evenly spread over an hour."""
    return [(HOUR * place / len(sizes), size) for place, size in enumerate(sizes)]


def test_growth_after_warm_up_is_found() -> None:
    found = trend("worker", samples(*(100 + place / 10 for place in range(400))), HOUR)

    assert found is not None
    assert not found.is_flat
    assert 0.15 < found.growth < 0.25


def test_growth_during_warm_up_is_ignored() -> None:
    found = trend("worker", samples(*[50] * 100, *[100] * 300), HOUR)

    assert found is not None
    assert found.is_flat
    assert found.growth == 0


def test_single_spikes_are_no_growth() -> None:
    sizes = [100.0] * 400
    sizes[350] = sizes[399] = 1_000
    found = trend("worker", samples(*sizes), HOUR)

    assert found is not None
    assert found.is_flat


def test_process_that_was_killed_has_no_trend() -> None:
    assert trend("worker", samples(*[100] * 400)[:250], HOUR) is None
