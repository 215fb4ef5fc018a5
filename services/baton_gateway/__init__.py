"""The gateway: public APIs, tokenising, admission, routing and streaming."""
