"""Memory of the CPU."""

import torch

from tokenspeed_rl.memory.anonymous import PAGE, AnonymousBlock, untouched
from tokenspeed_rl.memory.base import BlockMemory
from tokenspeed_rl.memory.free import free_bytes, total_bytes


class HostMemory(BlockMemory):
    """Regions in private anonymous pages, which go back to the system at `unmap`.

    Mapping takes no time, as each page comes when it is first touched. So that the kernel needs to kill
    nobody then, more than is free is refused, and what is mapped but not yet touched doesn't count as free.

    A forked child has none of it: touching a tensor over it there ends the child.
    """

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"), PAGE)

    def free(self) -> int:
        """Bytes that could be mapped now."""
        promised = sum(untouched(region.spans) for region in list(self.regions))
        return max(0, free_bytes(self.device) - promised)

    def total(self) -> int:
        """Bytes of the machine, within the process's limit."""
        return total_bytes(self.device)

    def new_block(self, nbytes: int) -> AnonymousBlock:
        """Addresses for `nbytes`."""
        return AnonymousBlock(nbytes)

    def host_free(self) -> int:
        """Bytes that backups could have now, next to the regions."""
        return self.free()
