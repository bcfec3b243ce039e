"""Permissions: validation, normal forms and matching."""

import pickle
import re
from dataclasses import FrozenInstanceError, replace
from ipaddress import ip_address
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from djqueue.core.errors import OptionError
from djqueue.core.permissions import NOTHING, Permissions, check_path, parse_net

NAMES = ("read", "write", "net", "env", "run", "listen", "db", "enqueue")
VALID = {
    "read": "/srv/in",
    "write": "/srv/out",
    "net": "example.com:443",
    "env": "AWS_REGION",
    "run": "/usr/bin/git",
    "listen": 8080,
    "db": "default",
    "enqueue": "images",
}


# What is granted.


def test_nothing_is_granted_by_default() -> None:
    assert [getattr(Permissions(), name) for name in NAMES] == [False] * len(NAMES)
    assert Permissions() == Permissions.none() == NOTHING


@pytest.mark.parametrize("name", NAMES)
def test_permission_grants_nothing_everything_or_a_list(name: str) -> None:
    assert getattr(Permissions.from_mapping({name: False}), name) is False
    assert getattr(Permissions.from_mapping({name: True}), name) is True
    assert getattr(Permissions.from_mapping({name: [VALID[name]]}), name) == (VALID[name],)


@pytest.mark.parametrize("name", NAMES)
def test_an_empty_list_grants_nothing(name: str) -> None:
    assert Permissions.from_mapping({name: []}) == NOTHING


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", [None, "/srv", b"/srv", 5, 0, 1.5, {"/srv": 1}, object(), iter(())])
def test_a_permission_of_another_type_is_refused(name: str, value: object) -> None:
    with pytest.raises(OptionError, match=f"^{name}: expected True, False or a list, got "):
        Permissions.from_mapping({name: value})


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("entry", [None, b"/srv", 1.5, True, ["/srv"], ""])
def test_an_entry_of_another_type_is_refused(name: str, entry: object) -> None:
    with pytest.raises(OptionError, match=f"^{name}: "):
        Permissions.from_mapping({name: [entry]})


def test_an_unknown_permission_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(OptionError, match=r"^unknown permission 'reads'; did you mean 'read'\?$"):
        Permissions.from_mapping({"reads": True})
    with pytest.raises(OptionError, match=r"^unknown permission 5$"):
        Permissions.from_mapping({5: True})  # type: ignore[dict-item]


# Values.


def test_equal_lists_in_any_order_are_equal_permissions() -> None:
    one = Permissions(read=["/b", "/a", "/a/"], net=["B.example", "a.example"])
    other = Permissions(read=("/a", "/b"), net={"a.example", "b.example."})

    assert one == other
    assert hash(one) == hash(other)
    assert one.read == ("/a", "/b")


def test_permissions_are_immutable_and_can_be_copied() -> None:
    granted = Permissions(read=["/srv"], net=True)

    with pytest.raises(FrozenInstanceError):
        granted.read = True  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(granted)) == granted
    assert replace(granted, net=False) == Permissions(read=["/srv"])


def test_permissions_survive_a_round_trip_as_plain_values() -> None:
    granted = Permissions(
        read=["{MEDIA_ROOT}/in"], write=True, net=["*.example.com"], listen=[0, 80], db=["default"]
    )

    assert granted.as_dict() == {
        "read": ["{MEDIA_ROOT}/in"],
        "write": True,
        "net": ["*.example.com"],
        "listen": [0, 80],
        "db": ["default"],
    }
    assert Permissions.from_mapping(granted.as_dict()) == granted
    assert NOTHING.as_dict() == {}


def test_a_description_names_what_is_granted_and_shortens_long_lists() -> None:
    assert NOTHING.describe() == "nothing"
    assert Permissions(read=True, net=["a.example:443"]).describe() == "read=all, net=[a.example:443]"
    assert (
        Permissions(listen=list(range(8_000, 8_007))).describe()
        == "listen=[8000, 8001, 8002, 8003, 8004 and 2 more]"
    )


# Paths.


@pytest.mark.parametrize("name", ["read", "write", "run"])
@pytest.mark.parametrize(
    "path",
    [
        *("srv", "./srv", "../srv", "", " ", "~/srv", "/srv/../etc", "/..", "/a\0b", "/\ud800"),
        *("/", "//", "///", "/.", "/proc", "/proc/", "//proc", "/proc/self/mem", "/proc/1", "/./proc"),
        *("/sys", "/sys/kernel", "/dev", "/dev/", "/etc", "/etc/.", "/" + "x" * 4_096),
    ],
)
def test_a_path_that_is_relative_or_too_wide_is_refused(name: str, path: str) -> None:
    with pytest.raises(OptionError, match=f"^{name}: "):
        Permissions.from_mapping({name: [path]})


@pytest.mark.parametrize(
    ("path", "normal"),
    [
        ("/srv", "/srv"),
        ("/srv/", "/srv"),
        ("//srv//in/", "/srv/in"),
        ("/srv/./in", "/srv/in"),
        ("/etc/ssl/certs", "/etc/ssl/certs"),
        ("/dev/shm", "/dev/shm"),
        ("/processed", "/processed"),
        ("/system", "/system"),
        ("/srv/a b", "/srv/a b"),
        ("/srv/..hidden", "/srv/..hidden"),
    ],
)
def test_a_path_is_kept_in_its_normal_form(path: str, normal: str) -> None:
    assert Permissions(read=[path]).read == (normal,)


@pytest.mark.parametrize(
    ("path", "advice"),
    [
        ("/srv/in/*", "name the directory '/srv/in'"),
        ("/srv/in/*.jpg", "name the directory '/srv/in'"),
        ("/srv/**/x", "name the directory '/srv'"),
        ("/srv/img-?.png", "name the directory '/srv'"),
        ("{MEDIA_ROOT}/in/*", "name the directory '{MEDIA_ROOT}/in'"),
        ("{MEDIA_ROOT}/*", "name the directory '{MEDIA_ROOT}'"),
        ("/*", "name a directory"),
        ("/et*", "name a directory"),
        (Path("/srv/*"), "name the directory '/srv'"),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["read", "write"])
def test_a_pattern_is_refused_with_the_directory_to_name(name: str, path: object, advice: str) -> None:
    with pytest.raises(OptionError) as caught:
        Permissions.from_mapping({name: [path]})

    assert str(caught.value) == (
        f"{name}: {str(path)!r} is a pattern; {advice}, which includes everything below it"
    )


def test_a_pattern_of_programs_is_refused() -> None:
    with pytest.raises(OptionError, match=r"^run: '/usr/bin/\*' is a pattern; name each program$"):
        Permissions(run=["/usr/bin/*"])


def test_a_path_object_is_a_path() -> None:
    assert Permissions(read=[Path("/srv/in")]) == Permissions(read=["/srv/in"])


@given(st.text(alphabet="/.ab{}procsyedtv", max_size=12))
def test_an_accepted_path_is_absolute_normal_and_below_no_closed_directory(text: str) -> None:
    try:
        path = check_path("read", text)
    except OptionError:
        return
    assert path.startswith("/")
    assert check_path("read", path) == path
    assert not {"", ".", ".."} & set(path.split("/")[1:])
    assert path.split("/")[1] not in ("proc", "sys")


# Templates.


VALUES = {"job_tmp": "/tmp/job-1", "MEDIA_ROOT": "/srv/media", "STATIC_ROOT": "/srv/static"}


def test_templates_are_kept_until_they_are_resolved() -> None:
    granted = Permissions(read=["{MEDIA_ROOT}/in/", "/a"], write=["{job_tmp}"])

    assert granted.read == ("/a", "{MEDIA_ROOT}/in")
    assert granted.templates == {"MEDIA_ROOT", "job_tmp"}
    assert granted.resolved(VALUES) == Permissions(read=["/a", "/srv/media/in"], write=["/tmp/job-1"])
    assert granted.resolved(VALUES).templates == frozenset()


def test_permissions_without_templates_resolve_to_themselves() -> None:
    granted = Permissions(read=True, write=["/srv"], listen=[80])

    assert granted.resolved({}) == granted


@pytest.mark.parametrize(
    "path",
    [
        *("{HOME}", "{}", "{job_tmp", "{job_tmp}x", "{job_tmp}/../..", "{job_tmp}/{MEDIA_ROOT}"),
        *("/srv/{job_tmp}", "{media_root}", "{ job_tmp }", "{{job_tmp}}"),
    ],
)
def test_an_unknown_or_misplaced_template_is_refused(path: str) -> None:
    with pytest.raises(OptionError, match=r"^write: "):
        Permissions(write=[path])


def test_a_program_has_no_template() -> None:
    with pytest.raises(OptionError, match=r"^run: .* must be an absolute path"):
        Permissions(run=["{job_tmp}/program"])


@pytest.mark.parametrize("values", [{}, {"MEDIA_ROOT": ""}, {"job_tmp": "/tmp"}])
def test_a_template_without_a_value_is_an_error(values: dict[str, str]) -> None:
    with pytest.raises(OptionError, match=r"^read: \{MEDIA_ROOT\} has no value here$"):
        Permissions(read=["{MEDIA_ROOT}/in"]).resolved(values)


@pytest.mark.parametrize("value", ["/", "media", "/proc", "/etc", "/srv/../..", "/proc/self"])
def test_the_value_of_a_template_is_checked_like_a_path(value: str) -> None:
    with pytest.raises(OptionError, match=r"^read: "):
        Permissions(read=["{MEDIA_ROOT}/in"]).resolved({"MEDIA_ROOT": value})


# Environment variables, ports, databases and queues.


@pytest.mark.parametrize("name", ["", "A=B", "A B", "1A", "*", "A*B", "A-B", "Ä", "A\n"])
def test_an_invalid_name_of_a_variable_is_refused(name: str) -> None:
    with pytest.raises(OptionError, match=r"^env: "):
        Permissions(env=[name])


def test_the_environment_is_filtered_by_names_and_prefixes() -> None:
    variables = {"AWS_REGION": "eu", "AWS_KEY": "k", "HOME": "/root", "LANG": "C"}

    assert Permissions(env=["AWS_*", "LANG"]).environment(variables) == {
        "AWS_REGION": "eu",
        "AWS_KEY": "k",
        "LANG": "C",
    }
    assert Permissions(env=["AWS"]).environment(variables) == {}
    assert Permissions(env=True).environment(variables) == variables
    assert NOTHING.environment(variables) == {}


@pytest.mark.parametrize("port", [-1, 65_536, "80", True, None, 80.0])
def test_an_invalid_port_to_listen_on_is_refused(port: object) -> None:
    with pytest.raises(OptionError, match=r"^listen: a port must be a whole number from 0 to 65535; got "):
        Permissions(listen=[port])  # type: ignore[list-item]


def test_ports_are_sorted_as_numbers() -> None:
    assert Permissions(listen=[8080, 80, 0, 65_535]).listen == (0, 80, 8080, 65_535)


def test_databases_and_queues_are_granted_by_name() -> None:
    granted = Permissions(db=["default"], enqueue=["images"])

    assert (granted.allows_db("default"), granted.allows_db("other")) == (True, False)
    assert (granted.allows_enqueue("images"), granted.allows_enqueue("mail")) == (True, False)
    assert Permissions(db=True, enqueue=True).allows_db("other")
    assert Permissions(db=True, enqueue=True).allows_enqueue("mail")
    assert not NOTHING.allows_db("default")
    assert not NOTHING.allows_enqueue("images")


def test_databases_that_do_not_exist_are_refused_with_the_nearest_alias() -> None:
    known = {"default": {}, "replica": {}}

    for granted in (NOTHING, Permissions(db=True), Permissions(db=["default", "replica"])):
        granted.check_databases(known)
    with pytest.raises(OptionError, match=r"^db: 'defualt' is not in DATABASES; did you mean 'default'\?$"):
        Permissions(db=["defualt"]).check_databases(known)
    with pytest.raises(OptionError, match=r"^db: 'shop' is not in DATABASES, which has: default, replica$"):
        Permissions(db=["default", "shop"]).check_databases(known)
    with pytest.raises(OptionError, match=r"^db: 'shop' is not in DATABASES, which has: nothing$"):
        Permissions(db=["shop"]).check_databases({})


# Network.


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("Example.COM", "example.com"),
        ("example.com.", "example.com"),
        ("example.com:443", "example.com:443"),
        ("localhost", "localhost"),
        ("*.Example.com:443", "*.example.com:443"),
        ("192.0.2.1", "192.0.2.1"),
        ("192.0.2.1:80", "192.0.2.1:80"),
        ("192.0.2.0/24", "192.0.2.0/24"),
        ("192.0.2.0/24:80", "192.0.2.0/24:80"),
        ("192.0.2.1/32", "192.0.2.1"),
        ("::1", "::1"),
        ("[::1]", "::1"),
        ("[::1]:80", "[::1]:80"),
        ("2001:DB8:0:0::1", "2001:db8::1"),
        ("[fd00::/8]:443", "[fd00::/8]:443"),
        ("::ffff:192.0.2.1", "192.0.2.1"),
        ("[::ffff:c000:201]:80", "192.0.2.1:80"),
        ("[::1:80]", "[::1:80]"),
        ("::1:80/128", "[::1:80]"),
        ("::1:8a", "::1:8a"),
        ("2001:db8::1:0", "2001:db8::1:0"),
        ("1:2:3:4:5:6:7:80", "1:2:3:4:5:6:7:80"),
        ("unix:/run/x.sock", "unix:/run/x.sock"),
    ],
)
def test_a_network_entry_is_kept_in_its_normal_form(text: str, normal: str) -> None:
    assert Permissions(net=[text]).net == (normal,)
    assert parse_net(normal).text == normal


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            "*",
            "*.",
            ".example.com",
            "a..b",
            "-a.example",
            "a-.example",
            "a b",
            "a/b",
            "http://a.example",
        ),
        *(
            "user@a.example",
            "a.example:",
            "a.example:0",
            "a.example:65536",
            "a.example:http",
            "a.example:1:2",
        ),
        *("256.0.0.1", "127.1", "0x7f000001", "1.2.3", "010.0.0.1", "192.0.2.1/24", "192.0.2.0/33"),
        *("[192.0.2.1]:80", "[::1", "::1]", "[::1]80", "[]", "fe80::1%eth0", "::ffff:192.0.2.0/120"),
        *("a.*.example", "*a.example", "**.example", "münchen.example", "x" * 64 + ".example", "a.\ud800"),
        *("unix:", "unix:run/x", "unix:/", "unix:/run/../x", "unix:/a\0b", "unix:/" + "x" * 107, "unix:@x"),
    ],
)
def test_a_malformed_network_entry_is_refused(text: str) -> None:
    with pytest.raises(OptionError, match=r"^net: "):
        Permissions(net=[text])


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("::1:80", "'[::1]:80'"),
        ("2001:DB8::1:443", "'[2001:db8::1]:443'"),
        ("::1:50000", "'[::1]:50000'"),
        ("1:2:3:4:5:6:7:8:80", "'[1:2:3:4:5:6:7:8]:80'"),
        ("::ffff:192.0.2.1:80", "'[::ffff:192.0.2.1]:80'"),
    ],
)
def test_an_address_that_may_end_in_a_port_is_refused_with_brackets_suggested(text: str, meant: str) -> None:
    with pytest.raises(OptionError, match=rf"^net: '{text}' is ambiguous.*{re.escape(meant)}"):
        Permissions(net=[text])


@pytest.mark.parametrize(
    ("rule", "host", "port", "expected"),
    [
        ("example.com", "example.com", 1, True),
        ("example.com", "EXAMPLE.com.", 443, True),
        ("example.com", "www.example.com", 443, False),
        ("example.com", "example.com.evil.example", 443, False),
        ("example.com:443", "example.com", 443, True),
        ("example.com:443", "example.com", 80, False),
        ("*.example.com", "www.example.com", 80, True),
        ("*.example.com", "a.b.example.com", 80, True),
        ("*.example.com", "example.com", 80, False),
        ("*.example.com", "badexample.com", 80, False),
        ("*.example.com", ".example.com", 80, False),
        ("192.0.2.1", "192.0.2.1", 80, True),
        ("192.0.2.1", "192.0.2.2", 80, False),
        ("192.0.2.1:80", "192.0.2.1", 81, False),
        ("192.0.2.1", "::ffff:192.0.2.1", 80, True),
        ("::ffff:192.0.2.1", "192.0.2.1", 80, True),
        ("192.0.2.0/24", "192.0.2.255", 80, True),
        ("192.0.2.0/24", "192.0.3.0", 80, False),
        ("0.0.0.0/0", "::1", 80, False),
        ("::/0", "::ffff:192.0.2.1", 80, False),
        ("fd00::/8", "fd12::1", 80, True),
        ("[::1]:80", "::1", 80, True),
        ("fe80::/10", "fe80::1%eth0", 80, True),
        ("127.0.0.1", "localhost", 80, False),
        ("localhost", "127.0.0.1", 80, False),
        ("127.0.0.1", "0.0.0.0", 80, False),
        ("unix:/run/x.sock", "/run/x.sock", 80, False),
    ],
)
def test_net_rule_matches_only_its_entries(rule: str, host: str, port: int, expected: bool) -> None:
    assert parse_net(rule).matches(host, port) is expected
    assert Permissions(net=[rule]).allows_net(host, port) is expected


def test_net_permission_can_grant_everything_or_nothing() -> None:
    assert Permissions(net=True).allows_net("example.com", 443)
    assert Permissions(net=True).allows_socket("/run/x.sock")
    assert not NOTHING.allows_net("example.com", 443)
    assert not NOTHING.allows_socket("/run/x.sock")


def test_a_unix_socket_is_granted_by_its_path() -> None:
    granted = Permissions(net=["unix:/run/x.sock", "127.0.0.1"])

    assert granted.allows_socket("/run/x.sock")
    assert not granted.allows_socket("/run/x.sock2")
    assert not granted.allows_socket("/run/../run/x.sock")
    assert not granted.allows_socket("")


def test_entries_can_be_added_to_the_network_permission() -> None:
    assert NOTHING.with_net("db.internal:5432") == Permissions(net=["db.internal:5432"])
    assert Permissions(net=["a.example"]).with_net("unix:/run/x") == Permissions(
        net=["a.example", "unix:/run/x"]
    )
    assert Permissions(net=True).with_net("a.example") == Permissions(net=True)
    assert NOTHING.with_net() is NOTHING


@given(st.ip_addresses(), st.integers(1, 65_535))
def test_an_address_matches_its_own_entry_and_only_its_port(address: object, port: int) -> None:
    text = f"[{address}]:{port}" if ":" in str(address) else f"{address}:{port}"
    rule = parse_net(text)

    assert rule.matches(str(address), port)
    assert rule.matches(ip_address(str(address)), port)
    assert not rule.matches(str(address), port % 65_535 + 1)


@given(st.text(max_size=30))
def test_any_string_is_parsed_or_rejected_as_an_invalid_option(text: str) -> None:
    try:
        rule = parse_net(text)
    except OptionError:
        return
    assert parse_net(rule.text).text == rule.text
    assert [bool(rule.host), bool(rule.suffix), rule.network is not None, bool(rule.path)].count(True) == 1
