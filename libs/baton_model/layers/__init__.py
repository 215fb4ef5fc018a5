"""Building blocks of the families: small values that own their parameters and know nothing of the model around them.

A block is told its own sizes; a slice of a model is built by giving a block the slice's sizes and tensors.
"""
