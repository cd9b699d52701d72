"""Microbenchmarks of this machine: kernels, copies, collectives, files; one command, one JSON file.

    python -m validation.microbench --out microbench.json                 everything this machine has
    python -m validation.microbench --out microbench.json --only gemm     one family
    python -m validation.microbench --out microbench.json --quick         few sizes, for a look
    python -m validation.microbench --out microbench.json --again-above 0.1

A measurement that is in the file already is not repeated, so an interrupted run continues where it stopped;
the last form repeats measurements during which others used more than a tenth of the machine.
`traces/README.md` describes the file; `zsim calibrate` reads it."""
