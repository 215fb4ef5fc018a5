"""Tokenizer, chat template, incremental detokenisation and stop strings. No torch."""
