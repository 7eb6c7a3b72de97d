"""A shared-out VAE as ComfyUI's process sees it: what its stand-in answers, and how the bands become one result."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sp_core.errors import SPError
from sp_core.host.ui.recipe import Recipe
from sp_core.host.ui.remote_vae import RemoteVae, Results
from sp_core.host.ui.vae_module import make_remote_vae
from sp_core.pool.coordinator import CallStats
from sp_core.pool.devices import WorkerDevice
from sp_core.pool.errors import WorkerFailed
from sp_core.vae import DecodePlan

PLAN = DecodePlan("tests.VAE", "Tests", lambda vae: 1)
DEVICES = (WorkerDevice("cpu", 0), WorkerDevice("cpu", 1))
NOTHING = {"exchange_s": 0.0, "exchange_bytes": 3, "exchanges": 1}


class Pool:
    """Stands for the workers: twice the input, cut in two bands of three; the last rank is idle."""

    out_of_step, world_size, last_call = True, 3, CallStats(bytes_sent=7)
    fails: Exception | None = None

    def call(self, operation: str, body: dict[str, Any], *, each: Any, **_: Any) -> None:
        self.body = body
        if self.fails is not None:
            raise self.fails
        whole = body["x"] * 2
        for rank, (start, stop) in enumerate(((0, 3), (3, 5))):
            each(rank, {"rows": whole[..., start:stop, :].to(body["dtype"]), "start": start, "height": 5, "ranks": 2, "stats": NOTHING})
        each(2, None)


@pytest.fixture
def pool() -> Pool:
    return Pool()


@pytest.fixture
def remote(pool: Pool) -> RemoteVae:
    session: Any = SimpleNamespace(ensure=lambda model: pool, running_pool=lambda: None)
    return RemoteVae(session, Recipe({}, "node", 0, {}), DEVICES, PLAN, 10, Results(torch.device("cpu"), torch.float16))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor, gain: float = 1.0) -> Tensor:
        raise AssertionError("this process computes nothing")


class VAE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.decoder, self.ratio = Decoder(), 8

    def decode(self, x: Tensor, output_buffer: Tensor | None = None) -> Tensor:
        return self.decoder(x + 1, gain=0.5, output_buffer=output_buffer)

    def encode(self, x: Tensor) -> Tensor:
        raise AssertionError("this process computes nothing")


def test_bands_become_one_result_in_comfyuis_dtype(remote: RemoteVae, pool: Pool) -> None:
    x = torch.randn(1, 2, 5, 4)
    result = remote.compute("decode", x, {})
    assert result.dtype == torch.float16 and torch.equal(result, (x * 2).half())
    assert pool.body["reset"] and not pool.out_of_step
    assert (len(remote.stats.forward_s), remote.stats.exchange_bytes, remote.stats.sent_bytes) == (1, 3, 7)
    assert remote.stats.decision == "decode: 2 of 3 devices, each a band of the frame"


def test_a_result_goes_where_somebody_made_room_for_it(remote: RemoteVae) -> None:
    x, room = torch.randn(1, 2, 5, 4), torch.zeros(1, 2, 5, 4)
    assert remote.compute("decode", x, {}, room) is room
    torch.testing.assert_close(room, x * 2, rtol=1e-3, atol=1e-3)


def test_too_little_memory_is_what_comfyui_goes_on_from_with_tiles(remote: RemoteVae, pool: Pool) -> None:
    pool.fails = WorkerFailed(1, "out of memory on its device", torch.OutOfMemoryError.__name__)
    with pytest.raises(torch.OutOfMemoryError, match="Rank 1 failed: out of memory"):
        remote.compute("decode", torch.zeros(1, 2, 5, 4), {})
    pool.fails = WorkerFailed(1, "something else", "ValueError")
    with pytest.raises(WorkerFailed):
        remote.compute("decode", torch.zeros(1, 2, 5, 4), {})


def test_methods_run_in_the_workers_and_the_rest_is_the_local_modules(remote: RemoteVae, pool: Pool) -> None:
    local = VAE()
    module: Any = make_remote_vae(local, PLAN, remote)
    assert isinstance(module, VAE) and type(module).__name__ == "VAE"
    assert torch.equal(module.encode(torch.ones(1, 1, 5, 2)), torch.full((1, 1, 5, 2), 2.0).half())
    assert pool.body["method"] == "encode"
    assert module.ratio == 8 and module.decoder is local.decoder and [*module.parameters()] == [*local.parameters()]
    assert module.state_dict().keys() == local.state_dict().keys()


def test_where_a_module_runs_in_the_workers_the_method_around_it_runs_here(remote: RemoteVae, pool: Pool) -> None:
    module: Any = make_remote_vae(VAE(), DecodePlan("tests.VAE", "Tests", lambda vae: 1, calls=("decoder", "ratio")), remote)
    assert torch.equal(module.decode(torch.ones(1, 1, 5, 2)), torch.full((1, 1, 5, 2), 4.0).half())
    assert (pool.body["method"], pool.body["kwargs"]) == ("decoder", {"gain": 0.5})
    room = torch.zeros(1, 1, 5, 2)
    assert module.decode(torch.ones(1, 1, 5, 2), output_buffer=room) is room


def test_comfyui_finds_no_modules_to_move_or_unpatch_below_it(remote: RemoteVae) -> None:
    module: Any = make_remote_vae(VAE(), PLAN, remote)
    assert [*module.modules()] == [module]
    assert module.to(torch.float64) is module and next(module.parameters()).dtype == torch.float32


def test_a_method_that_is_replaced_behind_the_node_is_refused(remote: RemoteVae) -> None:
    module: Any = make_remote_vae(VAE(), PLAN, remote)
    with pytest.raises(SPError, match=r"The VAE's decode was replaced .* Place the node that replaces it before SP VAE Patch"):
        module.decode = lambda x: x
    module.device = "anything that is no part of the VAE"


def test_comfyui_makes_room_for_the_pixels_where_the_plan_knows_how_many(remote: RemoteVae, pool: Pool) -> None:
    knows = DecodePlan("tests.VAE", "Tests", lambda vae: 1, decoded_shape=lambda vae, latent: (*latent[:3], 8 * latent[3]))
    module: Any = make_remote_vae(VAE(), knows, remote)
    assert module.comfy_has_chunked_io and module.decode_output_shape((1, 1, 5, 2)) == (1, 1, 5, 16)
    assert not hasattr(make_remote_vae(VAE(), PLAN, remote), "comfy_has_chunked_io")
    module.encode(torch.ones(1, 1, 5, 2), device=torch.device("cpu"))
    assert pool.body["kwargs"] == {}
