"""Model families: one file each, and the registry that finds the one for a checkpoint."""
