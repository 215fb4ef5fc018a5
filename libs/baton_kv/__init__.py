"""Pure mathematics of the KV cache: page layouts, the page pool, shard maps, write plans, the life of a transfer."""
