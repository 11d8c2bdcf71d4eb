"""Commands, terminal, pipes and exit codes; the only room that sees every other room."""
