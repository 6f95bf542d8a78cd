"""The group of processes that a broadcast goes through, apart from the trainers' own world.

NCCL takes each GPU once in a communicator. Where a sampler shares a GPU with a trainer rank, that
rank stays outside; it still gathers. Trainers have a world of their own, so this group is made
from a store, as stateless groups of serving engines are.
"""

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed

#: Torch's types leave much of this module out.
dist: Final[Any] = torch.distributed

HOST = "127.0.0.1"
#: How these machines are set: a program that uses NVLink multicast can put a host's GPUs out of
#: service. Set again wherever a process starts.
QUIET = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
}


@dataclass(frozen=True)
class Meeting:
    """Where processes find each other.

    Attributes:
        port: Of the driver's store on this host.
        seconds: Longest wait of a process for the others.
    """

    port: int
    seconds: float

    @property
    def limit(self) -> timedelta:
        """The longest wait."""
        return timedelta(seconds=self.seconds)

    def store(self, name: str) -> Any:
        """The part of the store that the processes of one group use."""
        return dist.PrefixStore(
            name,
            dist.TCPStore(
                HOST, self.port, is_master=False, timeout=self.limit, wait_for_workers=False
            ),
        )


def meeting_place(seconds: float) -> tuple[Meeting, Any]:
    """A store on a free port of this host; it ends with the reference to it."""
    limit = timedelta(seconds=seconds)
    store = dist.TCPStore(HOST, 0, is_master=True, timeout=limit, wait_for_workers=False)
    return Meeting(store.port, seconds), store


def keep_quiet() -> None:
    """Leave NVLink multicast off in this process and its children."""
    os.environ.update(QUIET)


class Link:
    """One member's side of the group; rank 0 is the trainer that sends."""

    def __init__(self, meeting: Meeting, *, rank: int, size: int, device: torch.device) -> None:
        self.rank, self.size, self._device = rank, size, device
        store = meeting.store("link")
        group = dist.ProcessGroup(store, rank, size)
        kinds = dist.ProcessGroup.BackendType
        if device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = meeting.limit
            kind, backend = kinds.NCCL, dist.ProcessGroupNCCL(store, rank, size, options)
        else:
            kind = kinds.GLOO
            backend = dist.ProcessGroupGloo(store, rank, size, timeout=meeting.limit)
        group._set_default_backend(kind)
        backend._set_sequence_number_for_group()
        group._register_backend(torch.device(device.type), kind, backend)
        self._group = group

    def broadcast(self, memory: torch.Tensor) -> Any:
        """Start to send ``memory`` from rank 0 to all; the work to wait for."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        return self._group.broadcast([memory], options)

    def meet(self) -> None:
        """Return once every member has come here, also on its device."""
        one = torch.ones(1, device=self._device)
        self._group.allreduce([one]).wait()
        assert int(one.item()) == self.size
