"""Threads of the one process that a benchmark compares workers with."""

import pytest

from sp_core.bench.all_against_one import environment_of_one, threads_of_all


@pytest.mark.parametrize(("cores", "workers", "threads"), [(2, 2, 2), (8, 3, 6), (2, 4, 4), (None, 1, 1)])
def test_the_one_process_has_the_threads_of_all_workers(
    monkeypatch: pytest.MonkeyPatch, cores: int | None, workers: int, threads: int
) -> None:
    """The caller's environment may ask for one thread, which would make the workers look twice as fast."""
    monkeypatch.setattr("os.cpu_count", lambda: cores)
    assert threads_of_all(workers) == threads
    assert environment_of_one(workers) == {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
