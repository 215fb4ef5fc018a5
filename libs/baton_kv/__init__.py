"""Mathematics of the KV cache: page layouts, shards, write plans, the page pool and the life of a transfer.

Everything here is a plain value or a pure state machine: no I/O, no clock, no thread.
"""
