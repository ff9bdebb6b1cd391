"""The real wire: bytes arrive where they should, and a peer that dies or stops is noticed."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress

import msgspec
import pytest
import torch

from megatron_rl.config import ConfigError
from megatron_rl.weight_sync.nixl import NixlArena, NixlWriter
from megatron_rl.weight_sync.transport import ArenaAddress, Piece, TransportError

NBYTES = 1 << 20
TLS = "tcp,sm,self"


@pytest.fixture(autouse=True)
def _no_inherited_transports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UCX_TLS", raising=False)


def test_pieces_arrive_in_the_named_half_and_nowhere_else() -> None:
    arenas = [NixlArena(NBYTES, ucx_tls=TLS) for _ in range(2)]
    writer = NixlWriter(NBYTES, ucx_tls=TLS)
    for arena in arenas:
        writer.connect(arena.address)
    writer.staging.copy_(torch.arange(NBYTES) % 251 + 1)
    pieces = [Piece(source=0, target=4096, nbytes=1000), Piece(source=500_000, target=64, nbytes=1)]
    writer.write(pieces, buffer_index=1, timeout_s=20)
    expected = torch.zeros(NBYTES, dtype=torch.uint8)
    expected[4096:5096] = writer.staging[:1000]
    expected[64] = writer.staging[500_000]
    for arena in arenas:
        assert torch.equal(arena.halves[1], expected)
        assert not arena.halves[0].any()
    names = {arena.address.peer for arena in arenas}
    assert len(names) == 2, "every arena has a name of its own"
    writer.write([], buffer_index=0, timeout_s=0)
    writer.close()
    for arena in arenas:
        arena.close()


def test_transports_set_outside_must_be_the_configured_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "rc,sm,self")
    with pytest.raises(ConfigError, match=r"must equal weight_sync\.ucx_tls, got 'rc,sm,self' and 'tcp,sm,self'"):
        NixlWriter(1, ucx_tls=TLS)


PEER = """
import sys, time, msgspec
from megatron_rl.weight_sync.nixl import NixlArena
arena = NixlArena(int(sys.argv[1]), ucx_tls=sys.argv[2])
print(msgspec.json.encode(arena.address).decode(), flush=True)
time.sleep(120)
"""


@pytest.fixture
def peer() -> Iterator[tuple[subprocess.Popen[str], ArenaAddress]]:
    """An arena in another process. tcp alone: shared memory would finish without the peer."""
    process = subprocess.Popen(
        [sys.executable, "-c", PEER, str(64 * NBYTES), "tcp,self"], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        yield process, msgspec.json.decode(process.stdout.readline(), type=ArenaAddress)
    finally:
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGCONT)
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.mark.parametrize(
    ("cause", "timeout_s", "message"),
    [
        (signal.SIGKILL, 20.0, r"failed: .*"),
        (signal.SIGSTOP, 1.0, r"failed: not done after 1 s \(weight_sync.transfer"),
    ],
)
def test_peer_that_is_gone_or_stands_still_is_named_in_time(
    peer: tuple[subprocess.Popen[str], ArenaAddress], cause: signal.Signals, timeout_s: float, message: str
) -> None:
    process, address = peer
    writer = NixlWriter(64 * NBYTES, ucx_tls="tcp,self")
    writer.connect(address)
    pieces = [Piece(0, 0, 64 * NBYTES)]
    writer.write(pieces, buffer_index=0, timeout_s=20)
    os.kill(process.pid, cause)
    started = time.monotonic()
    with pytest.raises(TransportError, match=rf"writing weights to {address.peer} {message}"):
        writer.write(pieces, buffer_index=1, timeout_s=timeout_s)
    assert time.monotonic() - started < timeout_s + 5


def test_a_process_ends_in_peace_while_its_arena_makes_progress() -> None:
    script = (
        "import megatron_rl.weight_sync.nixl as nixl\n"
        "nixl._PROGRESS_S = 0.0  # always inside NIXL\n"
        "arena = nixl.NixlArena(1024, ucx_tls='tcp,sm,self')\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "UCX_TLS"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
