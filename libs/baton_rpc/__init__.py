"""gRPC servers and channels, health, reflection, TLS, typed errors and deadlines."""
