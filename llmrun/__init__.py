"""llmrun: run a language model from the terminal and see what inference costs."""

__version__ = "0.1.0"
