"""The simulator: the real Scheduler and cache under simulated time, for machines that are not here.

cost.py       how long a step takes: a roofline, or what was fitted to a measured run
setup.py      which machine, model, allocation and limits; the scheduler for them
simulator.py  the loop: arrivals, plans, time, bookings
report.py     what a run means: throughput, latencies, batch, memory
paper.py      the PagedAttention paper's own tables, simulated
calibrate.py  a cost fitted to this computer, and its prediction beside a real run
replicas.py   many engines behind a router
"""
