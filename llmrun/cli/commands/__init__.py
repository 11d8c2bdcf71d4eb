"""One file per command: its name is the command's name, its ``command`` a function with help."""
