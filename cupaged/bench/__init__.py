"""Benchmarks: each takes a claim, says beforehand what it expects, runs the engine, and says whether that came true.

    catalogue.py   what there is: claim, prediction, defaults, and a setting that makes it fail
    lab.py         what a benchmark works with: engines as the user wants them, workloads, progress
    runner.py      drives an engine with requests that arrive in real time
    baseline.py    the engine on a cache without pages, and what its pool's slots are good for in each step
    stand_in.py    an engine whose model answers at random: for what is counted and does not depend on a model
    report.py      the result as values: tables, plots, verdict
    text_plot.py   plots as text, picture.py as a file (through matplotlib, an optional extra)

The others are the measurements themselves: serving.py, memory.py, preemption.py, sharing.py, hits.py, overhead.py.
"""
