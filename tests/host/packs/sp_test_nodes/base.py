"""What the nodes of this pack have in common."""


class ModelNode:
    """A node that takes a MODEL and gives a changed clone."""

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"model": ("MODEL",)}}

    RETURN_TYPES = ("MODEL",)
    FUNCTION = "patch"
    CATEGORY = "test"
