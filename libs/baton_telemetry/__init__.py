"""The catalogue of metrics, the metrics endpoint, and structured logs."""
