"""``scripts/bench gpus``: deltas beside a dense NCCL broadcast, on one host with several GPUs."""
