"""The trainer's wire to the orchestrator, against a real ZeroMQ peer."""

import threading
from collections.abc import Callable, Iterator

import pytest
import torch
import zmq

from megatron_rl.records import wire
from megatron_rl.trainer.link import OrchestratorError, OrchestratorLink

pytestmark = pytest.mark.usefixtures("world_of_one")


@pytest.fixture
def peer() -> Iterator[Callable[[bytes | None], str]]:
    """Starts an orchestrator that answers one request with these bytes, or never; gives its address."""
    context, threads = zmq.Context(), []

    def start(answer: bytes | None) -> str:
        socket = context.socket(zmq.REP)
        socket.setsockopt(zmq.LINGER, 0)
        port = socket.bind_to_random_port("tcp://127.0.0.1")

        def serve() -> None:
            if socket.poll(5000):
                wire.decode(socket.recv(), wire.Request)
                if answer is not None:
                    socket.send(answer)
            socket.close(linger=1000)

        threads.append(threading.Thread(target=serve))
        threads[-1].start()
        return f"tcp://127.0.0.1:{port}"

    yield start
    for thread in threads:
        thread.join()
    context.term()


def link(address: str, timeout_s: float = 5.0) -> OrchestratorLink:
    return OrchestratorLink(address, timeout_s=timeout_s, rank=0, device=torch.device("cpu"))


def test_a_reply_arrives_as_the_record_it_is(peer: Callable[[bytes | None], str]) -> None:
    connection = link(peer(wire.encode(wire.StateReply(state=b"abc"))))
    assert connection.ask(wire.StateRequest(step=3)) == wire.StateReply(state=b"abc")
    connection.close()


def test_a_failure_on_the_other_side_is_told_with_where_to_look(peer: Callable[[bytes | None], str]) -> None:
    connection = link(peer(wire.encode(wire.Failed(message="no prompts left"))))
    with pytest.raises(OrchestratorError, match=r"no prompts left.*orchestrator\.log"):
        connection.ask(wire.StateRequest(step=3))
    connection.close()


def test_silence_ends_after_the_deadline_and_names_the_option(peer: Callable[[bytes | None], str]) -> None:
    connection = link(peer(None), timeout_s=0.2)
    with pytest.raises(OrchestratorError, match=r"StateRequest within 0 s \(trainer\.batch_timeout_s\)"):
        connection.ask(wire.StateRequest(step=3))
    connection.close()
