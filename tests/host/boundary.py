"""What the tests of the boundary share: a comparison that also accepts a true refusal, and what the workers noted."""

from __future__ import annotations

import re
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

from host.graphs import Branch, Case, Comparison, Graph, Link, compare, latent, load, run_sp, sample, text
from host.observe import count

from sp_core.demo.comfy_server import ComfyServer, PromptFailed

#: two devices in a plain run; three and four in a campaign
DEVICE_COUNTS = ["cpu:2", "cpu:3", "cpu:4"][: count(1, 3)]
#: tokens: 4 frames of 4 x 4, which every device count up to four shares evenly
EVEN = "1,16,4,8,8"
LORA = {"lora_name": "tiny_wan_lora.safetensors", "strength_model": 0.8}
#: a node of the pack of stand-ins, by its class or by the pack
NAMED = r"SPForeign\w+|sp_foreign_nodes"


def named(name: str, case: Case) -> Case:
    case.__name__ = name
    return case


def on_wan(branch: Branch, model: Link, start: str = EVEN, **changes: float) -> Link:
    return sample(branch, model, text(branch, 4096), latent(branch, start), **changes)


def copy_checkpoint(server: ComfyServer, name: str, of: str = "tiny_wan_t2v") -> None:
    """The same weights under another name: ComfyUI makes a model of its own of them, which no other test shares."""
    folder = server.base / "models" / "diffusion_models"
    if not (folder / f"{name}.safetensors").exists():
        shutil.copy(folder / f"{of}.safetensors", folder / f"{name}.safetensors")


def plain(branch: Branch) -> Link:
    return on_wan(branch, branch.patch(load(branch, "tiny_wan_t2v")))


def before(class_type: str, checkpoint: str = "tiny_wan_t2v", **inputs: object) -> Case:
    """A node between the loader and SP Model Patch."""

    def case(branch: Branch) -> Link:
        return on_wan(branch, branch.patch(branch.add(class_type, model=load(branch, checkpoint), **inputs)[0]))

    return named(f"{class_type}_before", case)


def behind(class_type: str, checkpoint: str = "tiny_wan_t2v", **inputs: object) -> Case:
    """A node between SP Model Patch and the sampler."""

    def case(branch: Branch) -> Link:
        return on_wan(branch, branch.add(class_type, model=branch.patch(load(branch, checkpoint)), **inputs)[0])

    return named(f"{class_type}_behind", case)


def refusal(server: ComfyServer, case: Case, devices: str = "cpu:2") -> str:
    """The sentence that a prompt shows which must not run."""
    try:
        run_sp(server, case, devices)
    except PromptFailed as error:
        return str(error)
    raise AssertionError("the prompt was not refused")


def equal_or_refused(server: ComfyServer, case: Case, devices: str, names: str = NAMED) -> str:
    """Never a wrong picture: "" when it equals stock, else the sentence, which must name the node and a way out that exists."""
    try:
        comparison = compare(server, case, devices, check=False)
    except PromptFailed as error:
        check_sentence(str(error), names)
        return str(error)
    comparison.check(devices)
    return ""


def check_sentence(sentence: str, names: str = NAMED) -> None:
    assert re.search(names, sentence), f"the sentence does not name the node: {sentence}"
    assert re.search(r"Remove|remove|Place SP Model Patch", sentence), f"the sentence does not say what to do: {sentence}"
    # a guider and a sampler take a MODEL and give none: nothing can stand behind them
    impossible = re.search(r"Place SP Model Patch after (KSampler|SamplerCustom\w*|SPForeignGuider)", sentence)
    assert not impossible, f"nobody can do that: {sentence}"


# -- what workers note --------------------------------------------------------------------


def notes(server: ComfyServer, kind: str) -> dict[int, Counter[str]]:
    """How often each rank noted what, and nothing is noted any more."""
    found: dict[int, Counter[str]] = {}
    for path in sorted((server.base / "output").glob(f"{kind}-rank*.txt")):
        rank = re.search(r"rank(\d+)", path.name)
        if rank is not None:
            found[int(rank[1])] = Counter(path.read_text().split("\n")[:-1])
        path.unlink()
    return found


def watched(server: ComfyServer, devices: str = "cpu:2") -> None:
    """The workers of these devices note from now on which nodes they run."""

    def spy(branch: Branch) -> Link:
        model = branch.add("SPForeignSpy", model=load(branch, "tiny_wan_t2v"), number=time.monotonic_ns())[0]
        return on_wan(branch, branch.patch(model))

    ranks = set(range(int(devices.removeprefix("cpu:"))))
    run_sp(server, spy, devices)
    if set(notes(server, "ran")) != ranks:  # new workers: they note what comes behind that node
        run_sp(server, spy, devices)
        assert set(notes(server, "ran")) == ranks, "the workers note nothing"


def nodes_run_by_workers(server: ComfyServer, work: Callable[[], object], devices: str = "cpu:2") -> dict[int, Counter[str]]:
    """By rank: how often each worker runs a node of which class for ``work``. A rank that runs none is not there."""
    watched(server, devices)
    work()
    return notes(server, "ran")


def compare_and_list(server: ComfyServer, case: Case, devices: str = "cpu:2") -> tuple[Comparison, dict[int, Counter[str]]]:
    results: list[Comparison] = []
    ran = nodes_run_by_workers(server, lambda: results.append(compare(server, case, devices)), devices)
    return results[0], ran


def alone(devices: str | None) -> Branch:
    return Branch(Graph(), devices)


def base_beside(base: Path, folder: Path) -> Path:
    """Makes ``folder`` another base directory of a server: with the models and the packs of ``base``, and room for further packs."""
    for name in ("custom_nodes", "input", "output", "user", "temp"):
        (folder / name).mkdir()
    (folder / "models").symlink_to(base / "models")
    for pack in (base / "custom_nodes").iterdir():
        (folder / "custom_nodes" / pack.name).symlink_to(pack.resolve(), target_is_directory=True)
    return folder


def write_pack(base: Path, name: str, files: dict[str, str]) -> None:
    folder = base / "custom_nodes" / name
    folder.mkdir()
    for file, content in files.items():
        (folder / file).write_text(content)


def ranks_that_said(server: ComfyServer, sentence: str, since: int = 0) -> set[int]:
    lines: Iterable[str] = server.log(since).splitlines()
    return {int(found[1]) for line in lines if sentence in line and (found := re.search(r"\[SP rank (\d+)\]", line))}
