"""Model families, layers, loaders and attention backends."""
