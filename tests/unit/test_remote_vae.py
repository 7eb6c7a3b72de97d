"""A shared-out VAE as ComfyUI's process sees it: what its stand-in answers, and how the bands become one result."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sp_core.errors import SPError
from sp_core.host.ui.recipe import Recipe
from sp_core.host.ui.remote_vae import RemoteVae, Results
from sp_core.host.ui.vae_module import make_stand_in_vae
from sp_core.host.ui.watch import VaeWatch
from sp_core.pool.coordinator import CallStats
from sp_core.pool.devices import WorkerDevice
from sp_core.pool.errors import WorkerFailed
from sp_core.vae import DecodePlan

PLAN = DecodePlan("tests.VAE", "Tests", lambda vae: 1)
DEVICES = tuple(WorkerDevice("cpu", index) for index in range(3))
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
    session: Any = SimpleNamespace(ensure=lambda model: pool, running_pool=lambda: None, park_if_ended=lambda: None)
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
        self.conv, self.levels = nn.Conv2d(2, 2, 3), 2

    def decode(self, x: Tensor, output_buffer: Tensor | None = None) -> Tensor:
        return self.decoder(x + 1, gain=self.levels / 4, output_buffer=output_buffer)

    def encode(self, x: Tensor) -> Tensor:
        raise AssertionError("this process computes nothing")


def shared_out(local: nn.Module, remote: RemoteVae, plan: DecodePlan = PLAN) -> Any:
    patcher = SimpleNamespace(backup={}, object_patches_backup={})
    return make_stand_in_vae(local, plan, remote, VaeWatch(local, patcher))


def test_bands_become_one_result_in_comfyuis_dtype(remote: RemoteVae, pool: Pool, caplog: pytest.LogCaptureFixture) -> None:
    x = torch.randn(1, 2, 5, 4)
    with caplog.at_level("INFO"):
        result = remote.compute("decode", x, {})
    assert result.dtype == torch.float16 and torch.equal(result, (x * 2).half())
    assert pool.body["reset"] and not pool.out_of_step
    assert (len(remote.stats.forward_s), remote.stats.exchange_bytes, remote.stats.sent_bytes) == (1, 3, 7)
    assert remote.stats.decision == "decode: 2 of 3 devices, each a band of the frame"
    assert "SP: VAE of Tests, decode: 2 of 3 devices, each a band of the frame, in" in caplog.text
    assert "exchanges: 1, 3 B sent by rank 0. Its weights (10 B) stay on the devices until ComfyUI needs the memory" in caplog.text


def test_a_result_goes_where_somebody_made_room_for_it(remote: RemoteVae) -> None:
    x, room = torch.randn(1, 2, 5, 4), torch.zeros(1, 2, 5, 4)
    assert remote.compute("decode", x, {}, room) is room
    torch.testing.assert_close(room, x * 2, rtol=1e-3, atol=1e-3)


class TilePool(Pool):
    """Stands for the workers: each rank that has a tile computes it, and the VAE draws random numbers or not."""

    asked = 0

    def __init__(self, drew: bool) -> None:
        self.drew = drew

    def call(self, operation: str, body: dict[str, Any], *, each: Any, **_: Any) -> None:
        self.asked += 1
        for rank in range(self.world_size):
            each(rank, {"result": 2 * body["tiles"][rank], "drew": self.drew} if rank < len(body["tiles"]) else None)


@pytest.mark.parametrize("drew", [False, True])
def test_tiles_of_a_vae_that_draws_random_numbers_are_left_to_comfyui(drew: bool) -> None:
    pool = TilePool(drew)
    session: Any = SimpleNamespace(ensure=lambda model: pool)
    remote = RemoteVae(session, Recipe({}, "node", 0, {}), DEVICES, PLAN, 10, Results(torch.device("cpu"), torch.float32))
    tiles = [torch.ones(1), torch.ones(2)]
    for _ in range(2):
        results = remote.compute_tiles("decode", tiles)
        assert results is None if drew else [result.tolist() for result in results or ()] == [[2], [2, 2]]
    assert pool.asked == (1 if drew else 2)
    assert remote.stats.decision == "decode: 2 of 3 devices, each a tile of its own"


def test_too_little_memory_is_what_comfyui_goes_on_from_with_tiles(remote: RemoteVae, pool: Pool) -> None:
    pool.fails = WorkerFailed(1, "out of memory on its device", torch.OutOfMemoryError.__name__)
    with pytest.raises(torch.OutOfMemoryError, match="Rank 1 failed: out of memory"):
        remote.compute("decode", torch.zeros(1, 2, 5, 4), {})
    pool.fails = WorkerFailed(1, "something else", "ValueError")
    with pytest.raises(WorkerFailed):
        remote.compute("decode", torch.zeros(1, 2, 5, 4), {})


def test_methods_run_in_the_workers_and_the_rest_is_the_local_modules(remote: RemoteVae, pool: Pool) -> None:
    local = VAE()
    module: Any = shared_out(local, remote)
    assert isinstance(module, VAE) and type(module).__name__ == "VAE"
    assert torch.equal(module.encode(torch.ones(1, 1, 5, 2)), torch.full((1, 1, 5, 2), 2.0).half())
    assert pool.body["method"] == "encode"
    assert module.ratio == 8 and module.decoder is local.decoder and [*module.parameters()] == [*local.parameters()]
    assert module.state_dict().keys() == local.state_dict().keys()


def test_where_a_module_runs_in_the_workers_the_method_around_it_runs_here(remote: RemoteVae, pool: Pool) -> None:
    module: Any = shared_out(VAE(), remote, DecodePlan("tests.VAE", "Tests", lambda vae: 1, calls=("decoder", "ratio")))
    assert torch.equal(module.decode(torch.ones(1, 1, 5, 2)), torch.full((1, 1, 5, 2), 4.0).half())
    assert (pool.body["method"], pool.body["kwargs"]) == ("decoder", {"gain": 0.5})
    room = torch.zeros(1, 1, 5, 2)
    assert module.decode(torch.ones(1, 1, 5, 2), output_buffer=room) is room


def test_it_is_not_moved(remote: RemoteVae) -> None:
    module = shared_out(VAE(), remote)
    assert module.to("cpu") is module and module.to(torch.float32) is module


def test_a_method_that_is_replaced_behind_the_node_is_refused(remote: RemoteVae) -> None:
    module = shared_out(VAE(), remote)
    with pytest.raises(SPError, match=r"The VAE's decode was replaced behind SP VAE Patch .* Place SP VAE Patch after the node"):
        module.decode = lambda x: x
    module.pack = "anything that is no part of the VAE"
    setattr(module, "levels", 2)  # noqa: B010


def everywhere(function: Any) -> Any:
    """What packs do to each convolution of a VAE."""

    def change(vae: Any) -> None:
        for module in vae.modules():
            if isinstance(module, nn.Conv2d):
                function(module)

    return change


AT_ONCE: dict[str, tuple[Any, str]] = {
    "a number": (lambda vae: setattr(vae, "levels", 4), "The VAE's levels was changed from 2 to 4 behind SP VAE Patch"),
    "its dtype": (lambda vae: vae.to(torch.float64), "The VAE's dtype was changed from torch.float32 to torch.float64"),
    "other weights": (lambda vae: vae.load_state_dict(VAE().state_dict()), "The VAE's weights was replaced"),
    "a part": (lambda vae: setattr(vae, "conv", nn.Conv2d(2, 2, 1)), "The VAE's conv was replaced"),
    "a copy": (copy.deepcopy, "The VAE was copied behind SP VAE Patch"),
}
LATER: dict[str, tuple[Any, str]] = {
    "a text": (
        everywhere(lambda conv: setattr(conv, "padding_mode", "circular")),
        "The VAE's conv.padding_mode was changed from 'zeros' to 'circular' behind SP VAE Patch",
    ),
    "by apply": (
        lambda vae: vae.apply(lambda module: isinstance(module, nn.Conv2d) and setattr(module, "stride", (2, 2))),
        r"The VAE's conv.stride was changed from tuple\(1, 1\) to tuple\(2, 2\)",
    ),
    "a forward": (lambda vae: setattr(vae.decoder, "forward", abs), "The VAE's decoder.forward was replaced"),
    "a hook": (lambda vae: vae.decoder.register_forward_hook(lambda *_: None), "The VAE's decoder.forward was replaced"),
    "a part of a part": (lambda vae: vae.decoder.add_module("more", nn.ReLU()), "The VAE's decoder.more was replaced"),
    "a weight in place": (lambda vae: vae.conv.weight.data[1].zero_(), "The VAE's conv.weight was written in place"),
    "a new weight": (lambda vae: setattr(vae.conv, "bias", nn.Parameter(torch.ones(2))), "The VAE's conv.bias was written in place"),
}


@pytest.mark.parametrize(("change", "says"), AT_ONCE.values(), ids=AT_ONCE)
def test_a_change_of_the_stand_in_is_refused(remote: RemoteVae, change: Any, says: str) -> None:
    with pytest.raises(SPError, match=says):
        change(shared_out(VAE(), remote))


@pytest.mark.parametrize(("change", "says"), LATER.values(), ids=LATER)
def test_a_change_deep_in_the_vae_is_refused_when_it_computes(remote: RemoteVae, change: Any, says: str) -> None:
    module = shared_out(VAE(), remote)
    module.encode(torch.ones(1, 1, 5, 2))
    change(module)
    with pytest.raises(SPError, match=says) as caught:
        module.encode(torch.ones(1, 1, 5, 2))
    assert "free the models and the node cache" in str(caught.value)


def test_comfyui_makes_room_for_the_pixels_where_the_plan_knows_how_many(remote: RemoteVae, pool: Pool) -> None:
    knows = DecodePlan("tests.VAE", "Tests", lambda vae: 1, decoded_shape=lambda vae, latent: (*latent[:3], 8 * latent[3]))
    module: Any = shared_out(VAE(), remote, knows)
    assert module.comfy_has_chunked_io and module.decode_output_shape((1, 1, 5, 2)) == (1, 1, 5, 16)
    assert not hasattr(shared_out(VAE(), remote), "comfy_has_chunked_io")
    module.encode(torch.ones(1, 1, 5, 2), device=torch.device("cpu"))
    assert pool.body["kwargs"] == {}
