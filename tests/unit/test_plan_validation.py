"""A plan that does not fit a model is refused by a sentence; a kind that does not exist is an error where the plan is written."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from sp_core.errors import SPError
from sp_core.plans import PLANS, Attention, Blocks, HookPoint, HostFunctions, MaskRule, Replicated, SequencePlan, plan_named, validate
from sp_core.plans.plan import NoPlan, OwnHeads, SplitBehind
from sp_core.plans.shard_rules import by_token
from sp_core.reference.model import AudioVideoDiT, ReferenceConfig
from sp_core.reference.plan import REFERENCE


@pytest.fixture
def model() -> AudioVideoDiT:
    return AudioVideoDiT.seeded(ReferenceConfig(layers=2), 0)


def spoil_module(model: AudioVideoDiT) -> None:
    del model.blocks[1].video_self


def spoil_list(model: AudioVideoDiT) -> None:
    model.layers = model.blocks
    del model.blocks


def spoil_hook_point(model: AudioVideoDiT) -> None:
    model.output = model.video_head
    del model.video_head


def spoil_parameter(model: AudioVideoDiT) -> None:
    class Renamed(type(model.video_head)):  # type: ignore[misc]
        def forward(self, x: torch.Tensor, when: torch.Tensor) -> torch.Tensor:
            return super().forward(x, when)

    model.video_head.__class__ = Renamed


SPOILED = {
    spoil_module: "Block has no video_self",
    spoil_list: "AudioVideoDiT has no blocks",
    spoil_hook_point: "AudioVideoDiT has no video_head",
    spoil_parameter: "Renamed.forward has no parameter time",
}


def test_a_plan_fits_its_model(model: AudioVideoDiT) -> None:
    validate(REFERENCE, model, "this repository")


@pytest.mark.parametrize("spoil", SPOILED, ids=lambda spoil: spoil.__name__)
def test_a_model_that_was_changed_is_refused(model: AudioVideoDiT, spoil) -> None:  # type: ignore[no-untyped-def]
    spoil(model)
    sentence = (
        f"Reference model cannot run on several devices with ComfyUI 0.35: {SPOILED[spoil]}, "
        "which the sequence plan of AudioVideoDiT names. Update this extension, or remove SP Model Patch"
    )
    with pytest.raises(SPError, match=sentence):
        validate(REFERENCE, model, "ComfyUI 0.35")


def with_blocks(**changes: object) -> SequencePlan:
    [blocks] = REFERENCE.blocks
    return replace(REFERENCE, blocks=(replace(blocks, **changes),))  # type: ignore[arg-type]


WRONG_PLANS = {
    "stream": (with_blocks(stream="picture"), "Block.forward has no parameter picture"),
    "shard": (with_blocks(shard={"video_pe": by_token(1)}), "Block.forward has no parameter video_pe"),
    "replicated": (with_blocks(replicated=Replicated("words")), "Block.forward has no parameter words"),
    "attention": (with_blocks(attentions=(Attention("video_self.inner"),)), "Attention has no inner"),
    "heads": (with_blocks(attentions=(Attention("video_self", heads_of="inner"),)), "Attention has no inner"),
    "parameters by place": (with_blocks(parameters=("x", "time")), "Block.forward has parameters of its own and no \\*args"),
    "attention that takes no options": (with_blocks(attentions=(Attention("video_mlp.0"),)), "Linear.forward has no parameter transf"),
    "mask": (
        with_blocks(attentions=(Attention("video_self", mask=MaskRule("mask", "mask", lambda module, host: host.guide_mask_attention)),)),
        "Attention.forward has no parameter mask",
    ),
    "function": (with_blocks(attentions=(Attention("video_self", function="attend_fast"),)), "the code of Attention has no attend_fast"),
    "method of an attention": (with_blocks(attentions=(Attention("video_self", method="forward_gen"),)), "Attention has no forward_gen"),
    "own heads": (with_blocks(attentions=(Attention("video_self", own_heads=OwnHeads("qkv", "out", "heads")),)), "Attention has no qkv"),
    "method of a block": (with_blocks(method="forward_gen"), "Block has no forward_gen"),
    "split_behind": (replace(REFERENCE, split_behind=SplitBehind("before", "x")), "AudioVideoDiT has no method before"),
    "further_forwards": (replace(REFERENCE, further_forwards=("forward_block",)), "AudioVideoDiT has no method forward_block"),
    "makes a cache": (replace(REFERENCE, caches={"kv": "init_kv"}), "AudioVideoDiT has no method init_kv"),
    "cache": (replace(REFERENCE, further_forwards=("forward",), caches={"kv": "forward"}), "AudioVideoDiT.forward has no parameter kv"),
    "joined": (with_blocks(joined={"video_self.largest": lambda found: found}), "Attention has no largest"),
    "no list": (replace(REFERENCE, blocks=(Blocks("video_head", "x", ()),)), "video_head of AudioVideoDiT is no list of blocks"),
    "gather at a method": (replace(REFERENCE, hook_points=(HookPoint("_patchify", gather=True),)), "_patchify of AudioVideoDiT is no mod"),
    "method": (replace(REFERENCE, hook_points=(HookPoint("_patchify", {"t": by_token(1)}),)), "_patchify has no parameter t"),
    "forward": (replace(REFERENCE, forward="_forward_orig"), "AudioVideoDiT has no method _forward_orig"),
    "weight method": (replace(REFERENCE, weight_methods=("connect",)), "AudioVideoDiT has no method connect"),
    "after_run": (replace(REFERENCE, after_run="forget"), "AudioVideoDiT has no method forget"),
    "residuals": (replace(REFERENCE, residuals=("control",)), "AudioVideoDiT.forward has no parameter control"),
    "to_plain": (replace(REFERENCE, to_plain={"payload": dict}), "AudioVideoDiT.forward has no parameter payload"),
}


@pytest.mark.parametrize("case", WRONG_PLANS)
def test_everything_that_a_plan_names_is_checked(model: AudioVideoDiT, case: str) -> None:
    plan, missing = WRONG_PLANS[case]
    with pytest.raises(SPError, match=missing):
        validate(plan, model, "ComfyUI 0.35")


def test_parameters_that_are_taken_by_any_name_are_there() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList()

        def forward(self, x: torch.Tensor, **kwargs: object) -> torch.Tensor:
            return x

    plan = replace(REFERENCE, hook_points=(), residuals=("control",))
    validate(plan, Model(), "this repository")


def test_an_unknown_kind_of_attention_is_an_error_at_import() -> None:
    with pytest.raises(ValueError, match="'from_stream' is no kind of attention; there are self, joint, replicated_queries"):
        Attention("attn", "from_stream")  # type: ignore[arg-type]


def test_a_list_of_blocks_gathers_for_the_next_one_only() -> None:
    with pytest.raises(ValueError, match="AudioVideoDiT: a list of blocks gathers for the next one, and behind the last there is none"):
        with_blocks(gathers=True)


def test_functions_that_were_not_handed_in_say_so() -> None:
    with pytest.raises(SPError, match="without ComfyUI's functions"):
        HostFunctions().optimized_attention(1, 2, 3, 4)


def test_a_model_without_a_plan_is_refused_with_the_titles_of_those_that_have_one() -> None:
    with pytest.raises(NoPlan, match=r"^SomeModel has no sequence plan.*: Wan 2.1 / 2.2, .*Kandinsky 5.*"):
        plan_named("SomeModel")


def test_titles_are_told_apart() -> None:
    titles = [plan.title for plan in PLANS.values()]
    assert len(set(titles)) == len(titles)
    assert all(titles)
