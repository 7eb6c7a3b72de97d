"""Heads in groups: which heads a group has, and in which order groups are exchanged and attended to."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import torch

from sp_core.attention.head_groups import head_groups, heads_of, run_groups
from sp_core.comm.lane import ThreadLane, make_lane
from sp_core.layout import shard_sizes


@pytest.mark.parametrize("ranks", range(1, 9))
@pytest.mark.parametrize("groups", range(1, 7))
def test_groups_cover_all_heads_and_give_no_rank_more_than_one_exchange_would(ranks: int, groups: int) -> None:
    for heads in range(1, 61):
        found = head_groups(heads, ranks, groups)
        assert [head for group in found for head in group] == list(range(heads))
        assert len(found) == max(1, min(groups, heads // ranks))
        owned = [sum(len(heads_of(group, ranks, rank)) for group in found) for rank in range(ranks)]
        assert owned == list(shard_sizes(heads, ranks))
        # only a rank that has no head at all has none of a group
        assert len(found) == 1 or all(heads_of(group, ranks, rank) for group in found for rank in range(ranks))


class Log:
    """What happened, in the order in which it began, and on which thread."""

    def __init__(self) -> None:
        self.began: list[str] = []
        self.threads: dict[str, set[int]] = {}

    def add(self, what: str, number: int) -> None:
        self.began.append(f"{what}{number}")
        self.threads.setdefault(what, set()).add(threading.get_ident())

    def exchanges(self) -> list[str]:
        return [entry for entry in self.began if entry[0] != "a"]


def run(log: Log, lane: ThreadLane, groups: int, **faults: int) -> None:
    def step(what: str) -> Callable[..., int]:
        def act(group: range, came: int | None = None) -> int:
            log.add(what, group.start)
            assert came in (None, group.start), "another group's"
            if faults.get(what) == group.start:
                raise RuntimeError(f"{what} of group {group.start} failed")
            return group.start

        return act

    run_groups([range(n, n + 1) for n in range(groups)], step("s"), step("a"), step("g"), lane)  # type: ignore[arg-type]


@pytest.fixture
def lane():
    lane = ThreadLane()
    yield lane
    lane.close()


def test_the_next_groups_are_under_way_before_one_is_attended_to(lane: ThreadLane) -> None:
    log = Log()
    run(log, lane, 4)
    assert log.exchanges() == ["s0", "s1", "s2", "g0", "s3", "g1", "g2", "g3"]
    assert [entry for entry in log.began if entry[0] == "a"] == ["a0", "a1", "a2", "a3"]
    assert log.threads["a"] == {threading.get_ident()}
    assert log.threads["s"] == log.threads["g"] and len(log.threads["s"]) == 1
    assert log.threads["s"].isdisjoint(log.threads["a"])


def test_an_exchange_runs_while_a_group_is_attended_to(lane: ThreadLane) -> None:
    met: list[bool] = []
    moving = threading.Event()

    def slow(group: range, *_: object) -> int:
        moving.set()
        time.sleep(0.2)
        moving.clear()
        return group.start

    def attend(group: range, _: int) -> int:
        time.sleep(0.1)
        met.append(moving.is_set())
        return group.start

    run_groups([range(n, n + 1) for n in range(2)], slow, attend, slow, lane)  # type: ignore[arg-type]
    assert met[0], "nothing moved while the first group was attended to"


@pytest.mark.parametrize("fault", ["s0", "s1", "s2", "a0", "a2", "g0", "g3"])
def test_a_failure_ends_all_of_it_and_the_lane_serves_the_next(lane: ThreadLane, fault: str) -> None:
    log = Log()
    with pytest.raises(RuntimeError, match=f"{fault[0]} of group {fault[1]} failed"):
        run(log, lane, 4, **{fault[0]: int(fault[1])})
    began = list(log.began)
    if fault[0] != "a":
        assert log.exchanges()[-1] == fault, "an exchange behind the failed one, out of step with the other ranks"
    again = Log()
    run(again, lane, 4)
    assert again.exchanges() == ["s0", "s1", "s2", "g0", "s3", "g1", "g2", "g3"]
    assert log.began == began, "something of the failed run went on"


def test_what_a_lane_gives_lives_no_longer_than_whoever_asked(lane: ThreadLane) -> None:
    class Big:
        pass

    import gc
    import weakref

    seen: list[weakref.ref[Big]] = []

    def make() -> Big:
        big = Big()
        seen.append(weakref.ref(big))
        return big

    assert lane.start(make)() is not None
    lane.start(lambda: None)()
    gc.collect()
    assert seen[0]() is None


def test_a_call_in_a_lane_makes_the_tensors_that_its_caller_would(lane: ThreadLane) -> None:
    for inference in (False, True):
        with torch.inference_mode(inference):
            assert lane.start(lambda: torch.zeros(1))().is_inference() == inference


def test_only_devices_with_a_stream_or_a_thread_have_a_lane() -> None:
    assert isinstance(make_lane(torch.device("cpu")), ThreadLane)
    assert make_lane(torch.device("meta")) is None
