"""Where the parts of an RL run listen. Imports nothing heavy."""

import re
import socket
from urllib.parse import urlsplit

from megatron_rl.config import ConfigError
from megatron_rl.engine.server import is_loopback


def check_address_form(address: str) -> None:
    """ConfigError unless orchestrator.address is empty or one that ZeroMQ can use."""
    port = re.fullmatch(r"tcp://.+:(\d+)", address)
    if address and not (address.startswith("ipc://") or (port and 0 < int(port[1]) < 65536)):
        raise ConfigError(
            f"orchestrator.address must read tcp://HOST:PORT, got {address!r}; "
            "leave orchestrator.address empty for a free loopback port"
        )


def engine_place(url: str) -> tuple[str, int]:
    """(host, port) of one of engine.urls; ConfigError unless it reads http://HOST:PORT."""
    parts = urlsplit(url)
    try:
        port = parts.port
    except ValueError:
        port = None
    if not re.fullmatch(r"https?://[^/\s]+/?", url) or not parts.hostname or not port:
        raise ConfigError(f"engine.urls must read http://HOST:PORT, got {url!r}; mend it")
    return parts.hostname, port


def listening_address(address: str) -> str:
    """The address with its host's name resolved, since ZeroMQ listens on numeric addresses only."""
    check_address_form(address)
    match = re.fullmatch(r"tcp://([^\[\]*]+):(\d+)", address)
    if match is None:
        return address
    try:
        number = socket.gethostbyname(match[1])
    except OSError as error:
        raise ConfigError(
            f"orchestrator.address must name this machine, got {address} ({error.strerror}); write its IP address"
        ) from error
    if is_loopback(number) and not is_loopback(match[1]):
        raise ConfigError(
            f"orchestrator.address must be one at which the trainer reaches this machine, got {address}, which is "
            f"{number} here; write its IP address"
        )
    return f"tcp://{number}:{match[2]}"
