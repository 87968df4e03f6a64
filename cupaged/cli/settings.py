"""Settings: what the user's options say, sorted and checked, and the parameters of a request under them.

A request is sampled, or its likeliest answers are searched with beams; a few parameters mean something for both, and
the others exclude each other. Where the command line names one kind and a config file the other, the command line
decides, as for any option; and a line of a prompt file decides for itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

import click
from click.core import ParameterSource

from cupaged.config import EngineConfig
from cupaged.errors import ParameterError
from cupaged.params import BeamSearchParams, SamplingParams

_SAMPLING = frozenset(f.name for f in fields(SamplingParams))
_BEAMS = frozenset(f.name for f in fields(BeamSearchParams))
_SOURCES = (ParameterSource.COMMANDLINE, ParameterSource.ENVIRONMENT, ParameterSource.DEFAULT_MAP)
"""Where an option may come from, what wins first."""


@dataclass(frozen=True)
class Settings:
    """What the user chose, by field; fields that are not there keep their default.

    engine      of EngineConfig
    sampling    of SamplingParams, also those that a beam search has (max_tokens, ignore_eos)
    beams       of BeamSearchParams alone
    searches    a request that does not say otherwise is a beam search
    cache_salt  of requests that have none of their own
    """

    model: str
    engine: dict[str, Any]
    sampling: dict[str, Any]
    beams: dict[str, Any] = field(default_factory=dict)
    searches: bool = False
    cache_salt: str = ""

    @classmethod
    def of(cls, options: dict[str, Any], **defaults: Any) -> Settings:
        """Sort the running command's options; `defaults` are its own sampling defaults. Raises ConfigError, UsageError."""
        given = {name: value for name, value in options.items() if value is not None and value != ()}
        if "logit_bias" in given:
            given["logit_bias"] = dict(given["logit_bias"])
        engine = {f.name: given[f.name] for f in fields(EngineConfig) if f.name in given}
        sampling = defaults | {name: value for name, value in given.items() if name in _SAMPLING}
        beams = {name: value for name, value in given.items() if name in _BEAMS - _SAMPLING}
        searches = _searches([name for name in given if name in _SAMPLING - _BEAMS], list(beams))
        settings = cls(given["model"], engine, sampling, beams, searches, given.get("cache_salt", ""))
        EngineConfig.from_options(**engine)
        settings.params(SamplingParams())
        return settings

    def params(self, base: SamplingParams, **changes: Any) -> SamplingParams | BeamSearchParams:
        """One request's parameters: the model's defaults `base`, then the user's options, then its own changes.

        Raises ParameterError.
        """
        sampled = [name for name in changes if name in _SAMPLING - _BEAMS]
        searched = [name for name in changes if name in _BEAMS - _SAMPLING]
        if sampled and searched:
            raise ParameterError(f"{searched[0]} and {sampled[0]} exclude each other: a beam search does not sample")
        if searched or (self.searches and not sampled):
            shared = {name: value for name, value in self.sampling.items() if name in _BEAMS}
            values = shared | self.beams | changes
            if "beam_width" not in values:
                raise ParameterError(f"{[*searched, *self.beams][0]} needs beam_width")
            return BeamSearchParams.from_mapping(values)
        model = {f.name: getattr(base, f.name) for f in fields(base)}
        return SamplingParams.from_mapping(model | self.sampling | changes)


def _searches(sampling: list[str], beams: list[str]) -> bool:
    """Whether the options ask for a beam search: those that come from nearer the user decide. Raises UsageError for a tie."""
    context = click.get_current_context()
    for source in _SOURCES:
        searched, sampled = ([n for n in names if context.get_parameter_source(n) is source] for names in (beams, sampling))
        if searched and sampled:
            one, other = (_option(context, names[0]) for names in (searched, sampled))
            raise click.UsageError(f"{one} and {other} exclude each other: a beam search does not sample")
        if searched or sampled:
            return bool(searched)
    return False


def _option(context: click.Context, name: str) -> str:
    """An option as it is typed."""
    return next(option.opts[0] for option in context.command.params if option.name == name)
