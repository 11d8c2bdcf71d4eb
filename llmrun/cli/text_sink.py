"""How an answer is shown as text: live or plain, with how many numbers beside and after it."""

from collections.abc import Callable, Sequence

from llmrun.cli.apart import apart
from llmrun.cli.assemble import LoadedModel
from llmrun.cli.options import OutputFlags, Stats
from llmrun.cli.progress import activity
from llmrun.cli.prompting import Prompt
from llmrun.cli.session import Session
from llmrun.cli.sinks import LiveSink, PlainSink, text_filter
from llmrun.cli.summary import answer_line, full_account
from llmrun.engine.cache import KvCache
from llmrun.engine.events import Finish
from llmrun.measure.ceilings import Ceilings
from llmrun.measure.coldstart import Stage
from llmrun.measure.live import Meter
from llmrun.measure.roofline import step_floor_ns
from llmrun.measure.statistics import RequestStats

StepFloor = Callable[[int], float]
"""The least nanoseconds of a decode step at a depth (``roofline.step_floor_ns``)."""


def text_sink(
    session: Session,
    loaded: LoadedModel,
    prompt: Prompt,
    output: OutputFlags,
    step_floor: StepFloor | None = None,
) -> PlainSink | LiveSink:
    """Live on a terminal, unless nothing but the text is wanted; else plain."""
    terminal = session.terminal
    clean = text_filter(output.sanitize, terminal)
    if _shows_live(session, output.stats):
        return LiveSink(terminal, clean, Meter(prompt.t_submit_ns, loaded.context, step_floor))
    shows = not session.quiet and output.stats is not Stats.OFF
    return PlainSink(terminal, clean, shows_prefill=terminal.draws and shows)


def measure_step_floor(
    session: Session, loaded: LoadedModel, cache: KvCache, stats: Stats
) -> StepFloor | None:
    """What MBU in the live line needs; None unless full statistics are shown live.

    Reads a lot of memory for about a second, and says so: never between a prompt and its answer.
    """
    if stats is not Stats.FULL or not _shows_live(session, stats):
        return None
    with activity(session, "measuring the memory bandwidth, for MBU ..."):
        return apart(lambda _: step_floor_ns(loaded.decoder, cache, Ceilings(loaded.backend)))


def say_stats(
    session: Session,
    wanted: Stats,
    stats: RequestStats,
    finish: Finish,
    cold: Sequence[Stage] = (),
) -> None:
    """The statistics on stderr, as much as is wanted."""
    if session.quiet or wanted is Stats.OFF:
        return
    is_short = wanted is Stats.LINE
    account = answer_line(stats, finish) if is_short else full_account(stats, finish, cold)
    session.terminal.say(account, dim=True)


def _shows_live(session: Session, stats: Stats) -> bool:
    return session.terminal.is_live and not session.quiet and stats is not Stats.OFF
