"""Network permissions: which hosts, addresses, ports and UNIX sockets a job may connect to."""

import re
from dataclasses import dataclass
from functools import lru_cache
from ipaddress import (
    IPv4Address,
    IPv4Network,
    IPv6Address,
    IPv6Network,
    ip_address,
    ip_network,
)
from typing import Any

from .errors import OptionError
from .messages import shown

IPAddress = IPv4Address | IPv6Address
IPNetwork = IPv4Network | IPv6Network

HIGHEST_PORT = 65_535
LONGEST_SOCKET = 107
"""Maximum number of bytes of the path of a UNIX socket on Linux."""
LABEL = re.compile(r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?")
NUMERIC = re.compile(r"[0-9]+|0x[0-9a-f]*")
"""A last label that makes the C library read a name as an IPv4 address, such as `127.1` or `0x7f000001`."""
WRITTEN = re.compile(r"(?:\[(?P<bracketed>[^][]*)\]|(?P<plain>[^][:]*))(?::(?P<port>[0-9]{1,6}))?")
PORT = re.compile(r"[1-9][0-9]{0,4}")
FORMS = "host, host:port, an IP address, a CIDR network, [IPv6]:port, *.suffix or unix:/path"


@dataclass(frozen=True, slots=True, kw_only=True)
class NetRule:
    """One entry of the `net` permission. Exactly one of `host`, `suffix`, `network` and `path` is set."""

    text: str
    """Normal form of the entry."""
    host: str = ""
    """Host name in lower case, without a final dot."""
    suffix: str = ""
    """Suffix of the host names of `*.suffix`, with its leading dot."""
    network: IPNetwork | None = None
    """Network of an address or a CIDR entry."""
    path: str = ""
    """Path of a UNIX socket."""
    port: int | None = None
    """TCP port; None means every port."""

    def matches(self, host: "str | IPAddress", port: int) -> bool:
        """Return whether the rule lists a host and a port.

        An IPv4 address in IPv6 notation (`::ffff:192.0.2.1`) counts as the IPv4 address. A text that is an
        address is compared as one, never as a name.
        """
        if self.path or (self.port is not None and port != self.port):
            return False
        if isinstance(host, str):
            address = _address_of(host)
            if address is None:
                return self.matches_name(host)
        else:
            address = unmapped(host)
        return self.network is not None and address in self.network

    def matches_name(self, name: str) -> bool:
        """Return whether the rule lists a host name, for any port."""
        plain = normal_name(name)
        if self.suffix:
            return plain.endswith(self.suffix) and len(plain) > len(self.suffix)
        return bool(self.host) and plain == self.host

    def matches_path(self, path: str) -> bool:
        """Return whether the rule lists the path of a UNIX socket."""
        return bool(self.path) and path == self.path


@lru_cache(maxsize=1_024)
def parse_net(text: str) -> NetRule:
    """Return the rule of an entry of the `net` permission.

    Raises OptionError if the entry has none of the known forms.
    """
    if not isinstance(text, str):
        raise OptionError(f"net: expected {FORMS}; got {shown(text)}")
    if text.startswith("unix:"):
        return _parse_path(text)
    if not text.isascii():
        raise OptionError(f"net: {shown(text)} is not ASCII; write the name in its xn-- form")
    lowered = text.lower()
    _check_port_is_apart(text, lowered)
    if (network := _network_of(lowered)) is not None:
        return _network_rule(text, network, None)
    written = WRITTEN.fullmatch(lowered)
    if written is None:
        raise OptionError(f"net: {shown(text)} is not {FORMS}")
    port = None if written["port"] is None else _parse_port(text, written["port"])
    if written["bracketed"] is not None:
        network = _network_of(written["bracketed"])
        if network is None or network.version != 6:
            raise OptionError(f"net: {shown(text)} has no IPv6 address between its brackets")
        return _network_rule(text, network, port)
    host = written["plain"]
    if (network := _network_of(host)) is not None:
        return _network_rule(text, network, port)
    return _name_rule(text, host, port)


def unmapped(address: IPAddress) -> IPAddress:
    """Return the IPv4 address of an IPv4-mapped IPv6 address, and any other address without its scope."""
    if isinstance(address, IPv6Address):
        if address.ipv4_mapped is not None:
            return address.ipv4_mapped
        if address.scope_id is not None:
            return IPv6Address(int(address))
    return address


def normal_name(name: str) -> str:
    """Return a host name in lower case, without its final dot."""
    return name.lower().removesuffix(".")


def _check_port_is_apart(text: str, lowered: str) -> None:
    """Raise OptionError for an IPv6 address without brackets that may end in a port."""
    split = _split_port(lowered)
    if split is None:
        return
    address, port = split
    message = f"net: {shown(text)} is ambiguous; write '[{address}]:{port}' for port {port}"
    if _address_of(lowered) is not None:
        message += f", or '[{lowered}]' for the address"
    raise OptionError(message)


def _split_port(text: str) -> tuple[str, str] | None:
    """Return the address and the port as which an IPv6 address without brackets can be read."""
    address, _, port = text.rpartition(":")
    if ":" not in address or "%" in address or PORT.fullmatch(port) is None or int(port) > HIGHEST_PORT:
        return None
    return None if _address_of(address) is None else (address, port)


def _address_of(text: str) -> IPAddress | None:
    try:
        return unmapped(ip_address(text))
    except ValueError:
        return None


def _network_of(text: str) -> IPNetwork | None:
    if "%" in text:
        return None
    try:
        return ip_network(text)
    except ValueError:
        pass
    try:
        loose = ip_network(text, strict=False)
    except ValueError:
        return None
    raise OptionError(f"net: {text!r} has bits outside its network; did you mean {str(loose)!r}?")


def _network_rule(text: str, network: IPNetwork, port: int | None) -> NetRule:
    if isinstance(network, IPv6Network) and network.network_address.ipv4_mapped is not None:
        if network.prefixlen < network.max_prefixlen:
            raise OptionError(f"net: write {shown(text)} as an IPv4 network")
        network = ip_network(network.network_address.ipv4_mapped)
    name = str(network)
    if network.prefixlen == network.max_prefixlen:
        name = str(network.network_address)
        if port is None and _split_port(name) is not None:
            name = f"[{name}]"
    if port is not None:
        name = f"[{name}]:{port}" if network.version == 6 else f"{name}:{port}"
    return NetRule(text=name, network=network, port=port)


def _name_rule(text: str, host: str, port: int | None) -> NetRule:
    if host == "*":
        raise OptionError("net: '*' lists nothing; use net=True for every host")
    is_suffix = host.startswith("*.")
    plain = normal_name(host.removeprefix("*."))
    labels = plain.split(".")
    if len(plain) > 253 or not all(LABEL.fullmatch(label) for label in labels):
        raise OptionError(f"net: {shown(text)} is not {FORMS}")
    if NUMERIC.fullmatch(labels[-1]):
        raise OptionError(f"net: {shown(text)} is neither an IP address nor a host name")
    ending = "" if port is None else f":{port}"
    if is_suffix:
        return NetRule(text=f"*.{plain}{ending}", suffix=f".{plain}", port=port)
    return NetRule(text=f"{plain}{ending}", host=plain, port=port)


def _parse_path(text: str) -> NetRule:
    path = text.removeprefix("unix:")
    if not path.startswith("/") or path.endswith("/") or "\0" in path:
        raise OptionError(
            f"net: {shown(text)} must name a socket by its absolute path, as in unix:/run/x.sock"
        )
    if any(part in ("", ".", "..") for part in path.split("/")[1:]):
        raise OptionError(f"net: {shown(text)} must not contain '.', '..' or empty parts")
    try:
        size = len(path.encode())
    except UnicodeEncodeError:
        raise OptionError(f"net: {shown(text)} is not valid Unicode") from None
    if size > LONGEST_SOCKET:
        raise OptionError(f"net: {shown(text)} is longer than the {LONGEST_SOCKET} bytes of a socket's path")
    return NetRule(text=text, path=path)


def _parse_port(text: Any, digits: str) -> int:
    port = int(digits)
    if not 1 <= port <= HIGHEST_PORT:
        raise OptionError(f"net: the port of {shown(text)} must be from 1 to {HIGHEST_PORT}")
    return port
