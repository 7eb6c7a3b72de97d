"""Groups of ranks: the device mesh, the transports and sequence groups on it, and the rates measured over them."""
