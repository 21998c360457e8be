"""A socket to listen on, for every server of Sol."""

from __future__ import annotations

import errno
import socket

from sol.errors import ConfigError


def bind_socket(
    host: str, port: int, *, backlog: int | None = None, host_field: str = "host", port_field: str = "port"
) -> socket.socket:
    """A non-blocking socket at the first address of `host`; it listens if `backlog` says how many may wait.

    Port 0 takes a free one: `getsockname()` says which. Raises `ConfigError` that names `host_field` or `port_field`
    for an address that cannot be had.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise ConfigError(
            f"{host_field} {host!r} is not an address of this machine ({error}); use 127.0.0.1, or 0.0.0.0 for all",
            param=host_field,
        ) from None
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        if backlog is not None:
            listener.listen(backlog)
    except OSError as error:
        listener.close()
        raise _error(host, port, error, host_field, port_field) from None
    listener.setblocking(False)
    return listener


def listening_url(host: str, port: int) -> str:
    """How this machine reaches a server that listens there, without a slash at the end."""
    if host in ("0.0.0.0", "::", ""):  # noqa: S104  (compared, not bound)
        host = "localhost"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _error(host: str, port: int, error: OSError, host_field: str, port_field: str) -> ConfigError:
    if error.errno == errno.EADDRINUSE:
        message = f"{port_field} {port} is in use on {host}; stop what listens there, or choose another"
        return ConfigError(message, param=port_field)
    if error.errno == errno.EACCES:
        return ConfigError(f"{port_field} {port} needs privileges; choose one above 1023", param=port_field)
    return ConfigError(f"cannot listen on {host_field} {host}, port {port}: {error.strerror}", param=host_field)
