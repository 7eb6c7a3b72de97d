"""What touches ComfyUI: ``ui`` in its process, ``worker`` in the workers. Beside it, only models/ and demo/ import ComfyUI."""
