"""The compiled part: how it is built, and how it is called."""
