"""Whether a VAE consists of what the engine can share out."""

from __future__ import annotations

from torch import nn
from torch.nn.modules import conv, instancenorm, padding, pooling

from .plan import DecodePlan

#: they mix rows in a way that the engine does not know
_UNKNOWN = (
    *(conv._ConvTransposeNd, instancenorm._InstanceNorm, padding._CircularPadNd),
    *(pooling._MaxPoolNd, pooling._AvgPoolNd, pooling._AdaptiveAvgPoolNd, pooling._AdaptiveMaxPoolNd),
)


def why_not(plan: DecodePlan, vae: nn.Module) -> str | None:
    """What of ``vae`` cannot be computed on bands, for people; None where all can.

    Functions that a forward calls are not seen here: what a plan does not say of them, its tests have to notice.
    """
    if refusal := plan.refuses(vae):
        return refusal
    if replaced := [call for call in plan.calls if call in vae.__dict__]:
        return f"another node has replaced its {replaced[0]}"
    if not plan.bands:
        return None
    for path, module in vae.named_modules():
        problem = _problem(module)
        if problem is not None and not _below(path, vae, (*plan.whole, *plan.apart)):
            return f"{path} ({type(module).__name__}) {problem}"
    names = {type(module).__name__ for module in vae.modules()}
    missing = [name for name in (*plan.whole, *plan.apart, *plan.padded) if name not in names]
    return f"it has no {', '.join(missing)}, which its decode plan names" if missing else None


def _problem(module: nn.Module) -> str | None:
    if type(module).__name__ == "OptimizedModule":
        return "is compiled"
    if "forward" in module.__dict__:
        return "has a forward of another node"
    if isinstance(module, _UNKNOWN):
        return "mixes rows in a way that is not known here"
    if isinstance(module, (nn.Conv2d, nn.Conv3d)):
        if isinstance(module.padding, str):
            return f"has the padding '{module.padding}'"
        if module.padding[-2] and module.padding_mode == "circular":
            return f"pads the frame in the mode '{module.padding_mode}'"
    if isinstance(module, nn.Upsample) and module.mode not in ("nearest", "nearest-exact"):
        return f"enlarges the frame in the mode '{module.mode}'"
    return None


def _below(path: str, vae: nn.Module, classes: tuple[str, ...]) -> bool:
    """The module lies below one of ``classes``."""
    parts = path.split(".")
    return any(type(vae.get_submodule(".".join(parts[:end]))).__name__ in classes for end in range(1, len(parts)))
