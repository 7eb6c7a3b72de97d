"""One file an architecture or family: declarations only."""
