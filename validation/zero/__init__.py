"""The ZeRO papers as code: stages 0 to 3 and offload to host memory and NVMe, in plain torch.distributed.

Read in this order; each file is one idea:

1. `layout.py`       flat tensors, padding, shards
2. `collectives.py`  all-gather, reduce-scatter, and gloo's substitute for it
3. `partition.py`    which parameters form a unit
4. `flat.py`         a flat tensor, gathered or sharded
5. `hooks.py`        when it is gathered and freed
6. `reduction.py`    gradients: buckets, what each stage keeps
7. `adamw.py`, `scaler.py`      the update, and fp16's loss scale
8. `places.py`, `nvme.py`, `files.py`    states on the device, in host memory, in files
9. `engine.py`       all of it together
10. `checkpoint.py`  save and resume, also on another number of ranks
11. `closed_forms.py`  the expected bytes held and sent

Papers: Rajbhandari et al. 2020 (ZeRO, arXiv 1910.02054), Ren et al. 2021 (ZeRO-Offload, arXiv 2101.06840),
Rajbhandari et al. 2021 (ZeRO-Infinity, arXiv 2104.07857), Zhao et al. 2023 (FSDP, arXiv 2304.11277).
"""
