"""FNV-1a and the number of shards."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from djqueue.core.engine import Engine
from djqueue.core.ids import fnv1a32, shard_count


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("", 0x811C9DC5),
        ("a", 0xE40C292C),
        ("b", 0xE70C2DE5),
        ("foo", 0xA9F37ED7),
        ("foobar", 0xBF9CF968),
        ("chongo was here!\n", 0xD49930D5),
    ],
)
def test_hash_matches_published_values(text, value):
    assert fnv1a32(text) == value


@given(st.text())
def test_hashes_have_32_bits(text):
    assert 0 <= fnv1a32(text) < 2**32


@pytest.mark.parametrize(
    ("cores", "shards"),
    [
        (None, 4),
        (0, 4),
        (1, 4),
        (4, 4),
        (5, 8),
        (8, 8),
        (9, 16),
        (16, 16),
        (17, 32),
        (32, 32),
        (33, 64),
        (500, 64),
    ],
)
def test_shard_count_is_a_power_of_two_derived_from_cores(cores, shards):
    assert shard_count(cores) == shards


@pytest.mark.parametrize("cores", [1, 8, 64])
@pytest.mark.parametrize("name", ["q", "emails", "a{b}:ü"])
def test_queue_name_determines_its_shard(cores, name):
    engine = Engine(cores=cores)
    engine.queues.pause(name)

    places = [number for number, shard in enumerate(engine.context.shards) if name in shard.queues]

    assert len(engine.context.shards) == len(engine.context.processing) == shard_count(cores)
    assert places == [fnv1a32(name) & (shard_count(cores) - 1)]
