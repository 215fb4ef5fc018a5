"""Shareable memory, hand-off of descriptors between processes, and the layer counter."""
