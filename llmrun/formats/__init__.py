"""Checkpoint files in and out, one tensor at a time; knows no architectures."""
