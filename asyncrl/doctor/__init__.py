"""`asyncrl doctor`: what this machine can run, what is wrong with it, and one remedy each.

`run` starts every probe in a process of its own (`child`), with a time limit, and shows what
they found; the probes are plain functions in `machine` (hardware, limits, files) and `software` (packages, engines,
Redis, sandbox). Guarantees:
1. a probe that hangs, crashes or prints is a finding, not the end: its process group is killed after its limit;
2. nothing heavy is imported by the command itself: torch and engines are imported by their probes alone;
3. nothing is installed, changed or left running, and nothing outside of this machine is asked;
4. the exit code is 0 where everything that is needed works, 1 where something is wrong; what is merely missing or old
   is said and is no failure.
"""
