"""Run a function on N spawned CPU ranks joined by a gloo group on the loopback device."""

from __future__ import annotations

import os
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def _join(rank: int, world_size: int, store: str) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, world_size), rank=rank, world_size=world_size, timeout=timedelta(seconds=60)
    )


def _enter(rank: int, world_size: int, store: str, function: Callable, args: tuple, results: Any) -> None:
    _join(rank, world_size, store)
    try:
        results.put((rank, function(rank, world_size, *args), None))
    except BaseException:
        results.put((rank, None, traceback.format_exc()))
    finally:
        dist.destroy_process_group()


def run_ranks(world_size: int, function: Callable, *args: Any, timeout: float = 300) -> list[Any]:
    """Call ``function(rank, world_size, *args)`` on every rank; results in rank order."""
    context = mp.get_context("spawn")
    results = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as directory:
        store = os.path.join(directory, "store")
        ranks = [
            context.Process(target=_enter, args=(rank, world_size, store, function, args, results), daemon=True)
            for rank in range(world_size)
        ]
        for process in ranks:
            process.start()
        collected: dict[int, Any] = {}
        for _ in range(world_size):
            rank, value, error = results.get()
            if error is not None:
                for process in ranks:
                    process.kill()
                raise AssertionError(f"rank {rank} failed:\n{error}")
            collected[rank] = value
        for process in ranks:
            process.join(timeout)
    return [collected[rank] for rank in range(world_size)]


class RankPool:
    """N spawned ranks that stay and take many calls: for generated cases.

    ``serve(rank, world_size)`` runs once on every rank and returns the function that
    answers each call.
    """

    def __init__(self, world_size: int, serve: Callable) -> None:
        context = mp.get_context("spawn")
        self._directory = tempfile.TemporaryDirectory()
        store = os.path.join(self._directory.name, "store")
        self._pipes, self._processes = [], []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, world_size, store, serve, theirs), daemon=True)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)

    def call(self, *args: Any, timeout: float = 60) -> list[Any]:
        """The answers of all ranks, in rank order; an exception on any of them is an AssertionError here."""
        for pipe in self._pipes:
            pipe.send(args)
        answers = []
        for rank, pipe in enumerate(self._pipes):
            assert pipe.poll(timeout), f"rank {rank} did not answer"
            value, error = pipe.recv()
            assert error is None, f"rank {rank} failed:\n{error}"
            answers.append(value)
        return answers

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *_: object) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(10)
            process.kill()
        self._directory.cleanup()


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
