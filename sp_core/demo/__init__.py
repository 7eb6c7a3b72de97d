"""The demo, and what it shares with the tests: tiny checkpoints and a ComfyUI to run them in."""
