"""A worker's command line, made from that of ComfyUI's process."""

from __future__ import annotations

import pytest

from sp_core.host.ui.worker_arguments import worker_arguments

ALWAYS = ["--disable-all-custom-nodes", "--disable-api-nodes"]


@pytest.mark.parametrize(
    "kept",
    [
        ["--lowvram"],
        ["--reserve-vram", "1.5"],
        ["--use-pytorch-cross-attention"],
        ["--bf16-unet", "--fp32-vae"],
        ["--base-directory", "/some where"],
        ["--extra-model-paths-config", "a.yaml", "b.yaml"],
        ["--fast", "fp16_accumulation", "fp8_matrix_mult"],
        ["--base-directory=/x"],
    ],
)
def test_memory_attention_precision_and_paths_are_kept(kept: list[str]) -> None:
    assert worker_arguments(kept, cpu=False) == kept + ALWAYS


@pytest.mark.parametrize(
    "dropped",
    [
        ["--port", "8188"],
        ["--port=8188"],
        ["--listen"],
        ["--listen", "0.0.0.0,::"],
        ["--cuda-device", "1"],
        ["--cuda-device=0,1"],
        ["--default-device", "0"],
        ["--enable-cors-header", "*"],
        ["--auto-launch"],
        ["--cache-ram", "4.0"],
        ["--cache-none"],
        ["--whitelist-custom-nodes", "one", "two"],
        ["--verbose", "DEBUG"],
        ["--front-end-version", "Comfy-Org/ComfyUI_frontend@latest"],
    ],
)
def test_server_devices_and_caches_are_not(dropped: list[str]) -> None:
    assert worker_arguments(dropped, cpu=False) == ALWAYS
    around = worker_arguments(["--lowvram", *dropped, "--fp16-vae"], cpu=False)
    assert around == ["--lowvram", "--fp16-vae", *ALWAYS]


def test_cpu_workers_of_a_gpu_process() -> None:
    assert worker_arguments(["--highvram", "--fp32-unet"], cpu=True) == ["--fp32-unet", *ALWAYS, "--cpu"]


def test_cpu_is_not_said_twice() -> None:
    assert worker_arguments(["--cpu"], cpu=True).count("--cpu") == 1


def test_the_input_stays_as_it_is() -> None:
    argv = ["--port", "1", "--lowvram"]
    worker_arguments(argv, cpu=True)
    assert argv == ["--port", "1", "--lowvram"]
