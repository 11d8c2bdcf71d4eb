"""Text to ids and back, chat templates, stop strings, terminal filter; no tensors."""
