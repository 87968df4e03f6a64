"""`cupaged simulate`: the real scheduler and cache on a machine that is not here."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from cupaged.capacity import find_model
from cupaged.cli import simulate_text as text
from cupaged.cli.options import memory_size
from cupaged.cli.settings import Settings
from cupaged.cli.terminal import ProgressView, open_llm
from cupaged.errors import ConfigError, WorkloadError
from cupaged.hub import DEFAULT_MODEL
from cupaged.presets import DEVICES, MODELS, ModelShape, preset
from cupaged.sim import calibrate, paper, replicas
from cupaged.sim.report import simulate
from cupaged.sim.setup import ALLOCATIONS, BATCHINGS, Setup
from cupaged.workloads.generators import GENERATORS
from cupaged.workloads.request import Workload
from cupaged.workloads.trace import read_jsonl

F = TypeVar("F", bound=Callable[..., Any])

_WORKLOAD_OPTIONS = (
    click.option("--workload", default="sharegpt", show_default=True, help=f"What is asked: {', '.join(GENERATORS)}, or a trace (a .jsonl file)."),
    click.option("--rate", type=float, help="Requests a second, Poisson (default: all at once, or the trace's own times)."),
    click.option("--requests", "count", type=click.IntRange(max=10_000_000), default=1000, show_default=True, help="How many requests."),
    click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Same seed, same result."),
)
_MACHINE_OPTIONS = (
    click.option("--model", "-m", default="llama-3-8b", show_default=True, help=f"A preset ({', '.join(MODELS)}), folder, .gguf file or hub id."),
    click.option("--gpu", default="a100-80gb", show_default=True, help=f"A machine: {', '.join(DEVICES)}."),
    click.option("--memory", type=memory_size, metavar="SIZE", help="Memory of one GPU, in its place."),
    click.option("--num-blocks", type=int, help="KV blocks in the pool (default: what the memory holds beside the weights)."),
    click.option("--dtype", default="auto", help="Storage of the weights: auto (the machine's), float32, float16, bfloat16, fp8, int8."),
    click.option("--kv-cache-dtype", default="auto", help="Storage of keys and values: the same names."),
    click.option("--tensor-parallel", "gpus", type=int, default=1, show_default=True, help="GPUs that share the model."),
    click.option("--overhead", type=float, default=0.0, show_default=True, help="Seconds a step beside the roofline: launches and the host."),
)
_ENGINE_OPTIONS = (
    click.option("--allocation", "allocations", multiple=True, help=f"{', '.join(ALLOCATIONS)}, or all; repeatable (default: paged)."),
    click.option("--batching", default="continuous", show_default=True, help=f"{', '.join(BATCHINGS)}: prompts in steps of their own, or nobody joins a batch."),
    click.option("--block-size", type=int, default=16, show_default=True, help="Tokens per KV block."),
    click.option("--max-model-len", "max_len", type=int, help="Longest sequence in tokens (default: the model's)."),
    click.option("--max-num-seqs", type=int, default=256, show_default=True, help="Sequences computed in one step."),
    click.option("--max-num-batched-tokens", type=int, default=2048, show_default=True, help="Tokens computed in one step."),
    click.option("--prefix-cache/--no-prefix-cache", default=True, help="Keep computed prefixes and reuse them (default)."),
    click.option("--eviction", default="lru", show_default=True, help="lru, fifo, lfu, weighted."),
    click.option("--queue", default="fcfs", show_default=True, help="fcfs, lpm, dfs."),
)


def _with(options: tuple[Callable[[Any], Any], ...]) -> Callable[[F], F]:
    def decorate(command: F) -> F:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


@click.command()
@_with(_WORKLOAD_OPTIONS + _MACHINE_OPTIONS + _ENGINE_OPTIONS)
@click.option("--replicas", "num_replicas", type=int, help="So many engines, each with its cache, behind a router.")
@click.option("--routing", "routings", multiple=True, help=f"{', '.join(replicas.ROUTINGS)}; repeatable (default: random and prefix).")
@click.option("--paper", "as_paper", is_flag=True, help="The PagedAttention paper's memory and batch tables instead, beside its own figures.")
@click.option("--calibrate", "as_calibration", is_flag=True, help="Measure this computer with --model, predict the workload, run it, compare.")
@click.option("--json", "as_json", is_flag=True, help="JSON, one object a result.")
def command(as_paper: bool, as_calibration: bool, as_json: bool, **options: Any) -> None:
    """Serve a workload on a simulated machine, with this engine's own scheduler and cache.

    \b
    Examples:
      cupaged simulate --model llama-3-8b --gpu h100 --rate 20
      cupaged simulate --model opt-13b --gpu a100-40gb --rate 2 --allocation all --no-prefix-cache
      cupaged simulate --workload chats --replicas 64 --rate 300
      cupaged simulate --paper
      cupaged simulate --calibrate --model smollm2-135m-instruct --requests 32
    """
    _refuse_unused(as_paper, as_calibration, options["num_replicas"] is not None)
    if as_paper:
        _show([text.paper_tables(paper.waste_table(options["count"], options["seed"]), _batches(options))], as_json)
    elif as_calibration:
        _show([_calibration(options)], as_json)
    else:
        _simulate(options, as_json)


def _refuse_unused(as_paper: bool, as_calibration: bool, as_fleet: bool) -> None:
    """Raises ConfigError for an option that was given and would change nothing. Each mode has its own."""
    context = click.get_current_context()
    options = {option.name or "": option.opts[0] for option in context.command.params}
    if as_paper:
        mode, used = "--paper", {"as_paper", "as_json", "count", "seed"}
    elif as_calibration:
        mode, used = "--calibrate", {"as_calibration", "as_json", "model", "max_len", "workload", "count", "seed", "rate"}
    elif as_fleet:
        mode, used = "--replicas", options.keys() - {"allocations"}
    else:
        mode, used = "a single engine (no --replicas)", options.keys() - {"routings"}
    for name, shown in options.items():
        if name not in used and context.get_parameter_source(name) is not ParameterSource.DEFAULT:
            raise ConfigError(f"{mode} has no use for {shown}: leave it out")


def _show(results: list[text.Result], as_json: bool) -> None:
    for result in results:
        click.echo(json.dumps(result.values) if as_json else result.text)


def _batches(options: dict[str, Any]) -> dict[str, dict[str, float]]:
    return {name: paper.batch_table(name, options["count"], options["seed"]) for name, _ in paper.BATCH}


def _simulate(options: dict[str, Any], as_json: bool) -> None:
    device = preset("device", options["gpu"], DEVICES)
    with ProgressView() as progress:
        shape, _ = find_model(options["model"], progress)
    fields = {name: options[name] for name in Setup.__dataclass_fields__ if name in options and name != "model"}
    setup = Setup(model=shape, device=device, **fields).decided()
    assert setup.max_len is not None
    workload = _workload(options, shape, setup.max_len)
    if options["num_replicas"] is not None:
        for routing in options["routings"] or ("random", "prefix"):
            report = replicas.simulate_fleet(workload, setup, options["num_replicas"], routing, seed=options["seed"])
            _show([text.fleet(report)], as_json)
        return
    chosen = options["allocations"] or ("paged",)
    for allocation in ALLOCATIONS if "all" in chosen else chosen:
        _show([text.run(allocation, simulate(workload, replace(setup, allocation=allocation)))], as_json)


def _workload(options: dict[str, Any], shape: ModelShape, max_len: int) -> Workload:
    """A mix by name, or a trace. Raises WorkloadError."""
    name = options["workload"]
    if not name.endswith(".jsonl"):
        mix = name, options["count"], options["rate"], options["seed"], shape.vocab_size, max_len
        return replicas.fleet_workload(*mix, replicas=options["num_replicas"] or 1)
    if options["rate"] is not None:
        raise WorkloadError("a trace has its own times of arrival: leave --rate out")
    return read_jsonl(Path(name), shape.vocab_size, options["seed"])


def _calibration(options: dict[str, Any]) -> text.Result:
    """A prediction for this computer beside the real run. The default is no preset here, which cannot be run, but the built-in model."""
    if options["rate"] is not None:
        raise ConfigError("a calibration serves everything at once: leave --rate out")
    model, source = options["model"], click.get_current_context().get_parameter_source("model")
    if source is ParameterSource.DEFAULT:
        model = DEFAULT_MODEL
    elif model in MODELS:
        raise ConfigError(f"--calibrate runs a model, and the preset {model} has no weights: give --model a folder, a file or {DEFAULT_MODEL}")
    engine_options = {"max_model_len": options["max_len"]} if options["max_len"] else {}
    llm = open_llm(Settings(model, engine_options, {}))
    cost = calibrate.calibrate(llm.engine)
    setup = calibrate.setup_of(llm.engine)
    assert setup.max_len is not None
    comparison, _ = calibrate.compare(llm.engine, cost, _workload(options, setup.model, setup.max_len))
    return text.comparison(cost, comparison)
