"""The options of the storage itself; `Connections` reads those of the connection."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from djqueue.core.errors import ConfigurationError, OptionError
from djqueue.core.messages import kind_of, shown_name
from djqueue.core.options import DAY
from djqueue.core.policies import Keep
from djqueue.core.states import TERMINAL, State
from djqueue.core.suggest import nearest
from djqueue.core.units import milliseconds

from .client import TIMEOUT
from .location import read_timeout


@dataclass(frozen=True, slots=True, kw_only=True)
class MirrorOptions:
    """MIRROR: the copies of Redis's jobs in the tables."""

    states: frozenset[State] = frozenset(State)
    """STATES: states of the jobs that have rows."""
    retention: int = 7 * DAY
    """RETENTION: milliseconds (seconds in the setting) for which rows of ended jobs outlive their records."""
    keep: Mapping[State, Keep] = field(default_factory=dict)
    """KEEP: bounds for the rows of ended jobs of each queue, by outcome."""
    max_lag: int = 10_000
    """MAX_LAG: milliseconds (seconds in the setting) for which copies may wait while many jobs change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisOptions:
    """Checked options."""

    lease: int = 30_000
    """LEASE: milliseconds (seconds in the setting) for which a claim is valid unless renewed."""
    timeout: float = TIMEOUT
    """TIMEOUT: seconds after which a call fails."""
    replicas: int | None = None
    """REPLICAS: number of replicas that confirm a job with `durable=True` before its enqueue returns. None
    means one with sentinels, otherwise none.
    """
    prefix: str = ""
    """PREFIX: prefix of all keys and channels, for several projects in one Redis."""
    stream: int = 10_000
    """STREAM: approximate number of calls whose changes a queue keeps for mirror and event feed; 0:
    neither.
    """
    mirror: MirrorOptions | None = MirrorOptions()
    """MIRROR: a dict of its options, or False for no mirror and no stream."""

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> "RedisOptions":
        """Return the options in `given`. Raises ConfigurationError naming an invalid one."""
        values: dict[str, Any] = {"timeout": read_timeout(given)}
        if "LEASE" in given:
            values["lease"] = _duration("LEASE", given["LEASE"])
        if given.get("REPLICAS") is not None:
            replicas = given["REPLICAS"]
            if isinstance(replicas, bool) or not isinstance(replicas, int) or replicas < 0:
                raise ConfigurationError(f"REPLICAS: expected a number of replicas, got {kind_of(replicas)}")
            values["replicas"] = replicas
        if "PREFIX" in given:
            prefix = given["PREFIX"]
            if not isinstance(prefix, str) or set(prefix) & set("{}"):
                raise ConfigurationError(f"PREFIX: expected a string without braces, got {kind_of(prefix)}")
            values["prefix"] = prefix
        if "STREAM" in given:
            stream = given["STREAM"]
            if isinstance(stream, bool) or not isinstance(stream, int) or stream < 0:
                raise ConfigurationError(f"STREAM: expected a number of entries, got {shown_name(stream)}")
            values["stream"] = stream
        options = cls(**values, mirror=_mirror(given.get("MIRROR", True)))
        if options.mirror is None or not options.stream:
            return replace(options, mirror=None, stream=0)
        return options


def _duration(name: str, value: Any, least: int = 1) -> int:
    """Return the milliseconds of an option in seconds."""
    try:
        length = milliseconds(name, value)
    except OptionError as error:
        raise ConfigurationError(str(error)) from None
    if length < least:
        raise ConfigurationError(f"{name}: must be greater than 0")
    return length


def _mirror(given: Any) -> MirrorOptions | None:
    if given is True or given is False:
        return MirrorOptions() if given else None
    if not isinstance(given, Mapping):
        raise ConfigurationError(f"MIRROR: expected a dict or False, got {kind_of(given)}")
    values: dict[str, Any] = {}
    for name, value in given.items():
        if name == "STATES":
            values["states"] = _states(value)
        elif name in ("RETENTION", "MAX_LAG"):
            values[name.lower()] = _duration(f"MIRROR: {name}", value, least=0)
        elif name == "KEEP":
            values["keep"] = _keep(value)
        else:
            near = nearest(str(name), ("STATES", "RETENTION", "KEEP", "MAX_LAG"))
            raise ConfigurationError(f"MIRROR: {shown_name(name)} is not an option{near}")
    return MirrorOptions(**values)


def _states(given: Any) -> frozenset[State]:
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise ConfigurationError(f"MIRROR: STATES: expected a list of states, got {kind_of(given)}")
    words = [state.value for state in State]
    for word in given:
        if word not in words:
            near = nearest(str(word), words)
            raise ConfigurationError(f"MIRROR: STATES: {shown_name(word)} is not a state{near}")
    return frozenset(map(State, given))


def _keep(given: Any) -> Mapping[State, Keep]:
    bounds_of: dict[State, Keep] = {}
    words = {state.value.upper(): state for state in sorted(TERMINAL)}
    for word, bounds in _items("MIRROR: KEEP", given, words):
        where = f"MIRROR: KEEP: {word}"
        values: dict[str, int] = {}
        for name, value in _items(where, bounds, ("AGE", "COUNT")):
            if name == "AGE":
                values["age"] = _duration(f"{where}: AGE", value)
            elif isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ConfigurationError(f"{where}: COUNT: expected a number of rows, got {value!r}")
            else:
                values["count"] = value
        bounds_of[words[word]] = Keep(**values)
    return bounds_of


def _items(where: str, given: Any, known: Iterable[str]) -> Iterable[tuple[str, Any]]:
    """Return the entries of a dict that are not None. Their names must be known."""
    if not isinstance(given, Mapping):
        raise ConfigurationError(f"{where}: expected a dict, got {kind_of(given)}")
    for name in given:
        if name not in known:
            raise ConfigurationError(f"{where}: unknown key {name!r}{nearest(str(name), known)}")
    return [(name, value) for name, value in given.items() if value is not None]
