"""What things cost here: kernels, copies, collectives, files; one command, one JSON file.

    python -m validation.microbench --out microbench.json                 everything this machine has
    python -m validation.microbench --out microbench.json --only gemm     one family
    python -m validation.microbench --out microbench.json --quick         few sizes, for a look

A measurement that the file has already is not made again, so an interrupted run goes on where it stopped.
Each entry has the work (FLOPs, bytes), and median, spread and number of its repeats; `zsim calibrate` is
their reader."""
