"""LongCat-Video, built from the host's parts."""
