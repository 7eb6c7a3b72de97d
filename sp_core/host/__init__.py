"""Every touch of ComfyUI's internals. Nothing outside this folder (and models/) imports the host."""
