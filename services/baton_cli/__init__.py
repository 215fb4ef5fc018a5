"""The `baton` command."""
