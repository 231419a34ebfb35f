"""`asyncrl doctor`: the capabilities of this machine, its problems, and a remedy for each.

`run` starts every probe in a separate process (`probe_process`) with a time limit and prints the findings; the probes
are plain functions in `machine` (hardware, limits, files) and `software` (packages, engines, Redis, sandbox).
Guarantees:
1. a probe that hangs, crashes or prints is a finding: its process group is killed after its limit;
2. the command imports nothing heavy: only the probes of torch and engines import them;
3. nothing is installed, changed or left running, and no other machine is contacted;
4. the exit code is 0 if everything that is required works, 1 otherwise; missing optional or old parts are reported and
   are no failure.
"""
