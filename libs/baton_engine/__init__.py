"""Requests, batches, the scheduler, the sampler and the model process."""
