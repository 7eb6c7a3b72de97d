"""One file an architecture or family: its plan, and the shard rules that no other file uses."""
