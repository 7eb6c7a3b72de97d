"""What the nodes of the tests' packs have in common. A link in each pack leads here, for ComfyUI loads a pack from its own folder."""

import os


class ModelNode:
    """A node that takes a MODEL and gives a changed clone."""

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"model": ("MODEL",)}}

    RETURN_TYPES = ("MODEL",)
    FUNCTION = "patch"
    CATEGORY = "test"


def rank():
    """The rank of this worker; None in ComfyUI's process."""
    import torch.distributed as dist

    return dist.get_rank() if dist.is_initialized() else None


def note(file, line):
    """Append a line to a file of this rank in the output folder, which the workers share with ComfyUI's process."""
    import folder_paths

    with open(os.path.join(folder_paths.get_output_directory(), f"{file}-rank{rank()}.txt"), "a") as notes:
        notes.write(f"{line}\n")
