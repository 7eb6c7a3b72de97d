"""LongCat-Video, built from ComfyUI's parts."""
