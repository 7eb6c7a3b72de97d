"""A lane: where exchanges run, one after the other, while the caller computes."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TypeVar

import torch

T = TypeVar("T")


class Lane(ABC):
    """Takes calls and runs them in their order, beside what the caller does in the meantime.

    Whatever a call reads must stay unchanged until it has been waited for. While calls are under way nobody else uses the
    transports that they use.
    """

    @abstractmethod
    def start(self, call: Callable[[], T]) -> Callable[[], T]:
        """Begins ``call``; what is returned gives its result, on the caller's stream.

        What the call raises is raised here or by what is returned.

        Behind a call that has failed none is run until :meth:`settle`: each raises that error too.
        """

    @abstractmethod
    def settle(self) -> None:
        """Waits for all that was started, and forgets what failed. Nothing is raised.

        Nothing is dropped: ranks that fail alike have then made the same exchanges.
        """

    def close(self) -> None:  # noqa: B027 (a stream holds nothing)
        """Ends the lane. Safe to call twice."""


class ThreadLane(Lane):
    """A thread: for transports that wait for a link without using the processor."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "sp-exchange-lane")
        # weakly, so that results live no longer than whoever waits for them
        self._started: weakref.WeakSet[Future] = weakref.WeakSet()
        self._error: BaseException | None = None

    def start(self, call: Callable[[], T]) -> Callable[[], T]:
        # torch keeps it for each thread
        inference = torch.is_inference_mode_enabled()

        def run() -> T:
            if self._error is not None:
                raise self._error
            try:
                with torch.inference_mode(inference):
                    return call()
            except BaseException as error:
                self._error = error
                raise

        future = self._thread.submit(run)
        self._started.add(future)
        return future.result

    def settle(self) -> None:
        wait(list(self._started))
        self._started.clear()
        self._error = None

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)


class StreamLane(Lane):
    """A side stream of a CUDA device: for transports whose exchanges leave multiprocessors to the caller's stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side = torch.cuda.Stream(device, priority=-1)

    def start(self, call: Callable[[], T]) -> Callable[[], T]:
        # What the call reads is there then. So is what was read of memory that torch, or a transport, has taken back since.
        self._side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._side):
            result = call()
        done = self._side.record_event()
        kept = [call]  # and with it the tensors that the side stream reads

        def joined() -> T:
            torch.cuda.current_stream(self._device).wait_event(done)
            kept.clear()
            return result

        return joined

    def settle(self) -> None:
        torch.cuda.current_stream(self._device).wait_stream(self._side)


def make_lane(device: torch.device) -> Lane | None:
    """A lane for exchanges of tensors on ``device``; None where there is none for this type of device."""
    if device.type == "cpu":
        return ThreadLane()
    return StreamLane(device) if device.type == "cuda" else None
