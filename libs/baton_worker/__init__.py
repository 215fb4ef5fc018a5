"""What the prefill and decode workers share: engine client, agent client, registration, KV messenger."""
