"""The native libfabric engine and its Python face."""
