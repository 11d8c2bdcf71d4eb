"""``python -m llmrun``: the same as the ``llmrun`` command."""

from llmrun.cli.app import main

if __name__ == "__main__":
    main()
