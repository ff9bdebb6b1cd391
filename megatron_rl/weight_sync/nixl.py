"""NIXL over UCX. One arena per engine, one writer per trainer rank.

NIXL hands connection data over as pickled bytes: connect only peers that you trust.
"""

import atexit
import base64
import os
import threading
import time
import uuid
from collections.abc import Sequence
from typing import Any

import torch

from megatron_rl.config import ConfigError
from megatron_rl.weight_sync.transport import ArenaAddress, Piece, TransportError

_POLL_S = 0.0005
_PROGRESS_S = 0.002
"""NIXL's own progress thread spins: 25-40% of a core while nothing is sent, and slower transfers on few cores."""


class NixlArena:
    """Engine side. Allocates both halves, touches every page once, registers them."""

    def __init__(self, nbytes: int, *, ucx_tls: str) -> None:
        self._agent = _start_agent("engine", ucx_tls)
        memory = torch.empty(2, nbytes, dtype=torch.uint8).fill_(0)
        self.halves = list(memory)
        self._registration = self._agent.register_memory(memory)
        self._closing = threading.Event()
        self._progress = threading.Thread(target=self._make_progress, name="weight-arena", daemon=True)
        self._progress.start()
        # A thread inside NIXL when the interpreter ends is torn down through C++ frames, which aborts the process.
        atexit.register(self._stop_progress)

    @property
    def address(self) -> ArenaAddress:
        """How to reach this arena."""
        return ArenaAddress(
            peer=self._agent.name,
            metadata=base64.b64encode(self._agent.get_agent_metadata()).decode(),
            buffers=[half.data_ptr() for half in self.halves],
            nbytes=len(self.halves[0]),
        )

    def _make_progress(self) -> None:
        """A one-sided write over TCP needs its target to look at the socket now and then."""
        while not self._closing.wait(_PROGRESS_S):
            self._agent.get_new_notifs()

    def _stop_progress(self) -> None:
        self._closing.set()
        self._progress.join()

    def close(self) -> None:
        """Ends the registration."""
        self._stop_progress()
        atexit.unregister(self._stop_progress)
        self._agent.deregister_memory(self._registration)


class NixlWriter:
    """Trainer side."""

    def __init__(self, nbytes: int, *, ucx_tls: str) -> None:
        self._agent = _start_agent("trainer", ucx_tls)
        self.staging = torch.empty(max(nbytes, 1), dtype=torch.uint8).fill_(0)
        self._registration = self._agent.register_memory(self.staging)
        self._peers: list[ArenaAddress] = []

    def connect(self, address: ArenaAddress) -> None:
        """TransportError if the peer cannot be reached."""
        try:
            self._agent.add_remote_agent(base64.b64decode(address.metadata))
            self._agent.make_connection(address.peer)
        except Exception as error:
            raise TransportError(f"no connection to the weight arena {address.peer}: {error}") from error
        self._peers.append(address)

    def write(self, pieces: Sequence[Piece], *, buffer_index: int, timeout_s: float) -> None:
        """All pieces into one half of every connected arena. TransportError names every peer that failed.

        After an error the writer must be given up: bytes of an unfinished write may still be read from staging.
        """
        if not pieces:
            return
        deadline = time.monotonic() + timeout_s
        transfers, failed = {}, {}
        for address in self._peers:
            try:
                transfers[address.peer] = self._start(address, pieces, buffer_index)
            except Exception as error:
                failed[address.peer] = f"{type(error).__name__}: {error}"
        failed |= self._finish(transfers, deadline, timeout_s)
        if failed:
            raise TransportError("; ".join(f"writing weights to {name} failed: {why}" for name, why in failed.items()))

    def _start(self, address: ArenaAddress, pieces: Sequence[Piece], buffer_index: int) -> Any:
        source, target = self.staging.data_ptr(), address.buffers[buffer_index]
        handle = self._agent.initialize_xfer(
            "WRITE",
            self._agent.get_xfer_descs([(source + p.source, p.nbytes, 0) for p in pieces], mem_type="DRAM"),
            self._agent.get_xfer_descs([(target + p.target, p.nbytes, 0) for p in pieces], mem_type="DRAM"),
            address.peer,
        )
        if self._agent.transfer(handle) == "ERR":
            raise TransportError("NIXL refused to start the write")
        return handle

    def _finish(self, transfers: dict[str, Any], deadline: float, timeout_s: float) -> dict[str, str]:
        """Polls until every transfer is over or the deadline has passed; peer -> what failed."""
        failed: dict[str, str] = {}
        while transfers:
            for name, handle in list(transfers.items()):
                try:
                    state = self._agent.check_xfer_state(handle)
                except Exception as error:
                    state, failed[name] = "ERR", f"{type(error).__name__}: {error}"
                if state == "PROC":
                    continue
                del transfers[name]
                if state == "DONE":
                    self._agent.release_xfer_handle(handle)
                else:
                    failed.setdefault(name, "NIXL reports an error; the peer has probably died")
            if transfers and time.monotonic() > deadline:
                overdue = f"not done after {timeout_s:g} s (weight_sync.transfer_timeout_s)"
                return failed | dict.fromkeys(transfers, overdue)
            time.sleep(_POLL_S if transfers else 0)
        return failed

    def close(self) -> None:
        """Forgets the peers and ends the registration."""
        for address in self._peers:
            self._agent.remove_remote_agent(address.peer)
        self._peers.clear()
        self._agent.deregister_memory(self._registration)


def _start_agent(role: str, ucx_tls: str) -> Any:
    """A NIXL agent with a name that was never used before, so that nobody mistakes it for an earlier incarnation."""
    found = os.environ.get("UCX_TLS")
    if found is not None and found != ucx_tls:
        raise ConfigError(
            f"UCX_TLS in the environment must equal weight_sync.ucx_tls, got {found!r} and {ucx_tls!r}; "
            "unset UCX_TLS, or set weight_sync.ucx_tls to it"
        )
    os.environ["UCX_TLS"] = ucx_tls
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
    from nixl._api import nixl_agent, nixl_agent_config

    name = f"{role}-{os.getpid()}-{uuid.uuid4().hex[:12]}"
    return nixl_agent(name, nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))
