"""Worker processes, the control plane to them, and what keeps both honest."""
