"""Values that the default codec takes, and the equality that it promises."""

from datetime import UTC, datetime, time, timedelta, timezone
from decimal import Decimal
from typing import Any

from hypothesis import strategies as st

integers = st.integers(-(2**63), 2**64 - 1)
texts = st.text(st.characters(codec="utf-8"), max_size=20)
offsets = st.timedeltas(
    min_value=timedelta(hours=-23, minutes=-59), max_value=timedelta(hours=23, minutes=59)
)
zones = st.one_of(
    st.none(),
    st.just(UTC),
    st.builds(timezone, offsets),
    st.builds(timezone, offsets, texts),
    st.timezones(),
)
decimals = st.decimals(allow_nan=True, allow_infinity=True)
hashable_scalars = st.one_of(
    st.none(),
    st.booleans(),
    integers,
    st.floats(),
    texts,
    st.binary(max_size=20),
    st.datetimes(timezones=zones, allow_imaginary=True),
    st.dates(),
    st.times(timezones=zones),
    st.timedeltas(),
    decimals.filter(lambda value: not value.is_snan()),
    st.uuids(),
)
scalars = hashable_scalars | st.just(Decimal("sNaN123"))
keys = st.recursive(hashable_scalars, lambda keys: st.lists(keys, max_size=3).map(tuple), max_leaves=4)
values = st.recursive(
    scalars,
    lambda values: st.one_of(
        st.lists(values, max_size=4),
        st.lists(values, max_size=4).map(tuple),
        st.dictionaries(keys, values, max_size=4),
    ),
    max_leaves=15,
)


def anatomy(value: Any) -> Any:
    """All that there is to a value, type by type: equal for equal values only."""
    kind = type(value)
    if kind is dict:
        return kind, [(anatomy(key), anatomy(item)) for key, item in value.items()]
    if kind is list or kind is tuple:
        return kind, [anatomy(item) for item in value]
    if kind is float:
        return kind, "nan" if value != value else value.hex()
    if kind is Decimal:
        return kind, value.as_tuple()
    if kind is datetime or kind is time:
        return kind, value.replace(tzinfo=None), value.fold, zone_anatomy(value.tzinfo)
    return kind, value


def zone_anatomy(zone: Any) -> Any:
    if type(zone) is timezone:
        return timezone, zone.__getinitargs__()
    return type(zone), getattr(zone, "key", None)
