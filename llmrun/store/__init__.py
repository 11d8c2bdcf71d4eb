"""models.toml, model sources and verified files on disk; knows no tensors."""
