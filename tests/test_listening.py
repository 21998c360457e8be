from __future__ import annotations

import socket

import pytest

from sol.errors import ConfigError
from sol.listening import bind_socket, listening_url


def test_a_free_port_listens_and_refuses_a_second_server() -> None:
    with bind_socket("127.0.0.1", 0, backlog=8) as listener:
        port = listener.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)):
            pass
        with pytest.raises(ConfigError, match=f"server.port {port} is in use on 127.0.0.1; stop .* choose") as error:
            bind_socket("127.0.0.1", port, backlog=8, port_field="server.port")
        assert error.value.param == "server.port"


def test_without_a_backlog_the_port_is_taken_and_nobody_is_let_in() -> None:
    with bind_socket("127.0.0.1", 0) as reserved, pytest.raises(ConnectionRefusedError):
        socket.create_connection(reserved.getsockname())


@pytest.mark.parametrize("host", ["no.such.host.invalid", "192.0.2.1"])  # a name, and an address of somebody else
def test_an_address_of_another_machine_names_the_host(host: str) -> None:
    with pytest.raises(ConfigError, match=host) as error:
        bind_socket(host, 0, backlog=1, host_field="server.host")
    assert error.value.param == "server.host"


@pytest.mark.parametrize(
    ("host", "url"),
    [("0.0.0.0", "http://localhost:1"), ("::", "http://localhost:1"), ("::1", "http://[::1]:1"), ("a", "http://a:1")],
)
def test_the_url_that_reaches_it(host: str, url: str) -> None:
    assert listening_url(host, 1) == url
