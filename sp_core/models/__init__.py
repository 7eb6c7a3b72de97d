"""Models that ComfyUI lacks, built from ComfyUI's parts. Only the modules that need ComfyUI import it."""
