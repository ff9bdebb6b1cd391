"""The trainer's end of the wire to the orchestrator: rank 0 asks, every rank gets the answer.

One request is in flight at a time. A reply that does not come within its deadline, or that reports a failure,
raises OrchestratorError on rank 0; torchrun then stops the other ranks.
"""

import numpy as np
import torch
import torch.distributed as dist
import zmq

from megatron_rl.config import RunError
from megatron_rl.records import wire


class OrchestratorError(RunError):
    """The orchestrator failed or did not answer; the message says where to look."""


class OrchestratorLink:
    """Requests to the orchestrator at a ZeroMQ address such as tcp://127.0.0.1:5555."""

    def __init__(self, address: str, *, timeout_s: float, rank: int, device: torch.device) -> None:
        self._address, self._timeout_s, self._rank, self._device = address, timeout_s, rank, device
        self._socket = _connect(address) if rank == 0 else None

    def ask(self, request: wire.Request) -> wire.Reply:
        """Sends on rank 0 and returns the reply on every rank. Collective over the whole world."""
        data = self._ask_on_rank_0(request) if self._socket is not None else b""
        return wire.decode(_broadcast_bytes(data, self._device), wire.Reply)

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()

    def _ask_on_rank_0(self, request: wire.Request) -> bytes:
        assert self._socket is not None, "only rank 0 holds the socket"
        self._socket.send(wire.encode(request))
        if not self._socket.poll(int(self._timeout_s * 1000)):
            raise OrchestratorError(
                f"the orchestrator at {self._address} must answer {type(request).__name__} within "
                f"{self._timeout_s:.0f} s (trainer.batch_timeout_s) and did not; read logs/orchestrator.log of the run"
            )
        data = self._socket.recv()
        reply = wire.decode(data, wire.Reply)
        if isinstance(reply, wire.Failed):
            raise OrchestratorError(
                f"the orchestrator failed: {reply.message}; read logs/orchestrator.log in the run folder"
            )
        return data


def _connect(address: str) -> zmq.Socket:
    socket = zmq.Context.instance().socket(zmq.REQ)
    socket.setsockopt(zmq.LINGER, 0)
    socket.connect(address)
    return socket


def _broadcast_bytes(data: bytes, device: torch.device) -> bytes:
    """Rank 0's bytes on every rank."""
    if dist.get_world_size() == 1:
        return data
    size = torch.tensor([len(data)], dtype=torch.int64, device=device)
    dist.broadcast(size, src=0)
    if dist.get_rank() == 0:
        buffer = torch.from_numpy(np.frombuffer(data, dtype=np.uint8).copy()).to(device)
    else:
        buffer = torch.empty(int(size), dtype=torch.uint8, device=device)
    dist.broadcast(buffer, src=0)
    return buffer.cpu().numpy().tobytes()
