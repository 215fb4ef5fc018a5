"""The life of a transfer on both sides, as pure state machines: events in, actions out; no I/O, no clock.

`slots` gives out inbox slots, `inbox` is the receiver's side, `sending` the sender's, `tombstones` what the sender
remembers of transfers that are over.
"""
