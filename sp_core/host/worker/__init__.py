"""What runs in a worker process: replayed graphs, loaded models, forwards."""
