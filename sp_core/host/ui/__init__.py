"""What runs in ComfyUI's own process: nodes' work, the stand-in for the model, the session with the workers."""
