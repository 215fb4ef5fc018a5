"""The transfer agent."""
