"""No process of a server outlives it, not even a server that was killed with SIGKILL. Linux only."""

import ctypes
import multiprocessing
import os
import signal

SERVER_PID = "MEGATRON_RL_SERVER_PID"
"""Environment variable by which vLLM's own processes find the server they must not outlive."""
_PR_SET_PDEATHSIG = 1


def end_with_server() -> None:
    """Has the kernel kill this process when its parent dies. Does nothing in the server itself and outside of one."""
    server = os.environ.get(SERVER_PID)
    if server is None or int(server) == os.getpid():
        return
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    parent = multiprocessing.parent_process()
    if os.getppid() != (int(server) if parent is None else parent.pid):
        os._exit(1)  # the parent died before the kernel knew
