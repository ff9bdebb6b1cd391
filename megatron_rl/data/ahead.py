"""Prepares the next step in a thread while the current one trains."""

from concurrent.futures import Future, ThreadPoolExecutor

from megatron_rl.data.rank_step import RankStep, SampleStream


class StepsAhead:
    """The stream's steps in order, one prepared ahead. Whoever uses it leaves the stream alone.

    A step carries its own state, so what was prepared and not taken is not in any state that is saved.
    """

    def __init__(self, stream: SampleStream) -> None:
        self._stream = stream
        # One thread: steps are prepared one after another.
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="data")
        self._next: Future[RankStep] | None = None

    def next_step(self) -> RankStep:
        """The next step, waited for if need be. What went wrong in the thread is raised here."""
        due = self._next or self._executor.submit(self._stream.next_step)
        step = due.result()
        self._next = self._executor.submit(self._stream.next_step)
        return step

    def close(self) -> None:
        """Returns when the thread is done with what it has begun."""
        self._executor.shutdown(cancel_futures=True)
