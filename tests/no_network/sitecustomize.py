"""Refuses every connection that leaves this machine; on PYTHONPATH of child processes too.

Python imports `sitecustomize` at start, so whatever a test starts is held to it.
"""

import ipaddress
import socket
from typing import Any

_connect = socket.socket.connect
_connect_ex = socket.socket.connect_ex
_getaddrinfo = socket.getaddrinfo


def _require_loopback(host: Any) -> None:
    if host in {None, "", "localhost", b"localhost"}:
        return
    try:
        local = ipaddress.ip_address(host).is_loopback or ipaddress.ip_address(host).is_unspecified
    except ValueError:
        local = False
    if not local:
        raise ConnectionRefusedError(f"tests must stay on this machine, tried {host!r}")


def _checked(address: Any, family: int) -> None:
    if family in {socket.AF_INET, socket.AF_INET6}:
        _require_loopback(address[0])


def connect(self: socket.socket, address: Any) -> None:
    _checked(address, self.family)
    _connect(self, address)


def connect_ex(self: socket.socket, address: Any) -> int:
    _checked(address, self.family)
    return _connect_ex(self, address)


def getaddrinfo(host: Any, *args: Any, **kwargs: Any) -> Any:
    _require_loopback(host)
    return _getaddrinfo(host, *args, **kwargs)


socket.socket.connect = connect  # type: ignore[method-assign]
socket.socket.connect_ex = connect_ex  # type: ignore[method-assign]
socket.getaddrinfo = getaddrinfo
