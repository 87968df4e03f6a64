"""Workloads: what is asked of an engine and when; seeded, so that a result can be had again, and measured by one set of metrics.

request.py     the values: TraceRequest and Workload
lengths.py     how long prompts and answers are
arrivals.py    when requests come
generators.py  the mixes, by name
trace.py       one's own requests, as JSON lines
metrics.py     what a run's times mean
"""
