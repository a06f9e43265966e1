"""How this node speaks with others: gRPC over mutual TLS for tensors and the leader's line, a DHT for addresses."""
