"""Actors: one mailbox, one owner of state, supervision and deadlines. Standard library only."""
