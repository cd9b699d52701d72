"""What things cost here: kernels, copies, collectives, files; one command, one JSON file.

    python -m validation.microbench --out microbench.json                 everything this machine has
    python -m validation.microbench --out microbench.json --only gemm     one family
    python -m validation.microbench --out microbench.json --quick         few sizes, for a look
    python -m validation.microbench --out microbench.json --again-above 0.1

A measurement that the file has already is not made again, so an interrupted run goes on where it stopped; the
last form makes those again that were taken while others used more than a tenth of the machine.
`traces/README.md` describes the file; `zsim calibrate` is its reader."""
