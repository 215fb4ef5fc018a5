"""Requests, batches, the scheduler, the sampler and the model process.

`scheduler`, `messages` and `client` are for workers and import no torch; `model_process` holds the model.
"""
