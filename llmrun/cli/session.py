"""What every command of one process shares: settings and terminal, and how a model is chosen."""

from dataclasses import dataclass, replace

from llmrun.cli.options import GeneralOptions
from llmrun.cli.settings import Settings
from llmrun.cli.terminal import Terminal
from llmrun.errors import UsageError


@dataclass(frozen=True)
class Session:
    """Made in ``app``, given to each command as ``context.obj``."""

    settings: Settings
    terminal: Terminal
    quiet: bool = False
    verbose: bool = False

    def with_options(self, options: GeneralOptions) -> "Session":
        """The session as the command's general options want it."""
        offline = self.settings.offline or options.offline
        return replace(
            self,
            settings=replace(self.settings, offline=offline),
            quiet=options.quiet,
            verbose=options.verbose,
        )

    def say(self, text: str) -> None:
        """A line on stderr, unless --quiet."""
        if not self.quiet:
            self.terminal.say(text)

    def model(self, named: str | None) -> str:
        """The model to use: named, else LLMRUN_MODEL, the config's default, the catalog's."""
        configured = self.settings.config.get("default")
        if configured is not None and not isinstance(configured, str):
            raise UsageError(
                f"The config file {self.settings.config_file} has default = {configured!r}.",
                'Write the name of a model there: default = "NAME".',
            )
        if name := named or self.settings.model or configured:
            return name
        from llmrun.store import catalog

        return catalog.load().default
