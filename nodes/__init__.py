"""What the user sees: one file a node."""
