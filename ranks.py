"""Several processes as one: who I am, and the few things ranks say to each other. One process is rank 0 of 1.

Only rank 0 prints and writes; every rank reaches every call here, in the same order. The gradient's all-reduce is in
grpo.py.

    rank, world_size, device = setup()             # python ...: (0, 1, device); torchrun: from its environment
    mean_over_ranks({"reward": 1.5}, world_size, device)
"""
from __future__ import annotations

import os
import sys
from datetime import timedelta

import torch
import torch.distributed

from images import DataError


def setup() -> tuple[int, int, torch.device]:
    """(rank, world size, device), from torchrun's environment; nothing else asks how many processes there are."""
    rank, local_rank, world_size, local_size = (int(os.environ.get(name, default)) for name, default in (
        ("RANK", 0), ("LOCAL_RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_WORLD_SIZE", 1)))
    cuda = torch.cuda.is_available()
    if cuda and local_size > torch.cuda.device_count():
        raise DataError(f"{local_size} processes but {torch.cuda.device_count()} GPUs here: give torchrun "
                        f"--nproc_per_node {torch.cuda.device_count()}")
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    if world_size > 1:
        torch.distributed.init_process_group("nccl" if cuda else "gloo", timeout=timedelta(minutes=30))
    if rank > 0:
        sys.stdout = open(os.devnull, "w")           # what goes wrong on this rank still goes to stderr
    return rank, world_size, device


def world_size() -> int:
    """How many processes have met; 1 without torchrun, or before `setup`."""
    return torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1


def local_ranks() -> tuple[int, int]:
    """(rank, processes) on this machine, for work on what its disk holds."""
    if world_size() == 1:
        return 0, 1
    return int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def mean_over_ranks(values: dict[str, float], world_size: int, device: torch.device) -> dict[str, float]:
    """Average a step's numbers over the ranks, in one call."""
    flat = torch.tensor(list(values.values()), dtype=torch.float64, device=device)                # (numbers,)
    if world_size > 1:
        torch.distributed.all_reduce(flat)
    return dict(zip(values, (flat / world_size).tolist()))


def gather(value, world_size: int) -> list:
    """Every rank's value, in rank order, on every rank."""
    found = [value]
    if world_size > 1:
        found = [None] * world_size
        torch.distributed.all_gather_object(found, value)
    return found


def agree_on(value, world_size: int):
    """Rank 0's value, on every rank."""
    box = [value]
    if world_size > 1:
        torch.distributed.broadcast_object_list(box)
    return box[0]


if __name__ == "__main__":
    print("rank {} of {} on {}".format(*setup()))
