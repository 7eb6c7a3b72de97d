"""Which parallel degrees a forward gets, and why: pure functions of shapes and measured rates."""
