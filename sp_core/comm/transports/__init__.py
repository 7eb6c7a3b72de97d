"""One file a way of moving shards between ranks."""
