"""Runs a function on N spawned CPU ranks joined by a gloo group on the loopback device."""

from __future__ import annotations

import os
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import wait
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def fast_context() -> Any:
    """Processes that fork from one which has imported torch: several times cheaper than to import it in each."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "pytest", "hypothesis", "numpy"])
    return context


def _join(rank: int, world_size: int, store: str) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, world_size), rank=rank, world_size=world_size, timeout=timedelta(seconds=60)
    )


def _enter(rank: int, world_size: int, store: str, function: Callable, args: tuple, answers: Any) -> None:
    try:
        _join(rank, world_size, store)
        answers.send((function(rank, world_size, *args), None))
    except BaseException:
        answers.send((None, traceback.format_exc()))
    finally:
        answers.poll(60)  # tensors are handed over while they are received: stay until the other end is closed
        if dist.is_initialized():
            dist.destroy_process_group()


def run_ranks(world_size: int, function: Callable, *args: Any, timeout: float = 300) -> list[Any]:
    """Call ``function(rank, world_size, *args)`` on every rank; results in rank order.

    An exception on any rank, its death or its silence is an AssertionError here.
    """
    context = fast_context()
    ranks, pipes = [], []
    with tempfile.TemporaryDirectory() as directory:
        store = os.path.join(directory, "store")
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            ranks.append(context.Process(target=_enter, args=(rank, world_size, store, function, args, theirs), daemon=True))
            ranks[-1].start()
            theirs.close()  # a rank that dies now ends its pipe
            pipes.append(ours)
        try:
            answers = _answers(pipes, ranks, timeout)
            for pipe in pipes:
                pipe.close()
            for process in ranks:
                process.join(60)
        finally:
            for process in ranks:
                process.kill()
    return answers


def _answers(pipes: list[Any], processes: list[Any], timeout: float) -> list[Any]:
    """One answer of every rank, in rank order; whichever rank fails first is named."""
    collected: dict[int, Any] = {}
    deadline = time.monotonic() + timeout
    waiting = {pipe: rank for rank, pipe in enumerate(pipes)}
    while waiting:
        ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
        assert ready, f"ranks {sorted(waiting.values())} did not answer in {timeout} s"
        for pipe in ready:
            rank = waiting.pop(pipe)
            collected[rank] = _received(pipe, rank, processes[rank])
    return [collected[rank] for rank in range(len(pipes))]


def _received(pipe: Any, rank: int, process: Any) -> Any:
    try:
        value, error = pipe.recv()
    except EOFError:
        process.join(10)
        raise AssertionError(f"rank {rank} died with exit code {process.exitcode}") from None
    assert error is None, f"rank {rank} failed:\n{error}"
    return value


class RankPool:
    """N spawned ranks that stay and take many calls, so that each case of a table can be a test of its own.

    ``serve(rank, world_size)`` runs once on every rank and returns the function that answers each call. After a call that
    fails the ranks are no longer in step: the next call starts new ones, so that one failure does not become many.
    """

    def __init__(self, world_size: int, serve: Callable) -> None:
        self.world_size, self._serve = world_size, serve
        self._pipes: list[Any] = []
        self._processes: list[Any] = []

    def call(self, *args: Any, timeout: float = 120) -> list[Any]:
        """The answers of all ranks, in rank order; an exception on any of them is an AssertionError here."""
        if not self._pipes:
            self._start()
        try:
            for pipe in self._pipes:
                pipe.send(args)
            return _answers(self._pipes, self._processes, timeout)
        except BaseException:
            self._stop(0)
            raise

    def _start(self) -> None:
        context = fast_context()
        self._directory = tempfile.TemporaryDirectory()
        store = os.path.join(self._directory.name, "store")
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, self.world_size, store, self._serve, theirs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def _stop(self, patience_s: float) -> None:
        if not self._pipes:
            return
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(patience_s)
            process.kill()
        self._pipes, self._processes = [], []
        self._directory.cleanup()

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop(10)


class RankPools:
    """A RankPool for every world size that is asked for; each call names its function, as :func:`run_ranks` does."""

    def __init__(self, one_size_at_a_time: bool = False) -> None:
        self._pools: dict[int, RankPool] = {}
        self._one_size_at_a_time = one_size_at_a_time

    def call(self, world_size: int, function: Callable, *args: Any, timeout: float = 120) -> list[Any]:
        """``function(rank, world_size, *args)`` of every rank, in rank order."""
        if world_size not in self._pools:
            if self._one_size_at_a_time:
                self.__exit__()
            self._pools[world_size] = RankPool(world_size, _any_function)
        return self._pools[world_size].call(function, *args, timeout=timeout)

    def __enter__(self) -> RankPools:
        return self

    def __exit__(self, *_: object) -> None:
        for pool in self._pools.values():
            pool.__exit__()
        self._pools.clear()


def _any_function(rank: int, world_size: int) -> Callable:
    return lambda function, *args: function(rank, world_size, *args)


def _serve(rank: int, world_size: int, store: str, serve: Callable, pipe: Any) -> None:
    _join(rank, world_size, store)
    answer = serve(rank, world_size)
    while True:
        try:
            args = pipe.recv()
        except EOFError:
            break
        try:
            pipe.send((answer(*args), None))
        except BaseException:
            pipe.send((None, traceback.format_exc()))
    dist.destroy_process_group()
