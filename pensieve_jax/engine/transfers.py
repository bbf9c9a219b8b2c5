"""The seam for moving chunks between tiers.

Device memory is the only tier in this version, so nothing implements the protocol yet; it fixes what the
engine will ask of a host tier, so that `CacheManager` and the loop need not change shape for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Transfers(Protocol):
    """Copies chunks between the device pool and another tier, beside the steps.

    Every copy is prepared in program order with the steps around it and completes on its own; nobody
    waits for one outside `completed`.
    """

    def prepare_swap_out(self, pages: Sequence[int], slots: Sequence[int]) -> int:
        """Start copying device pages to the tier's slots; returns a transfer id.

        When it returns the gather is dispatched: the pages may be written by later steps. The copies count
        only once `completed` names the transfer.
        """
        ...

    def prepare_swap_in(self, slots: Sequence[int], pages: Sequence[int]) -> int:
        """Start copying slots to device pages; returns a transfer id.

        Steps dispatched later read the pages' new contents.
        """
        ...

    def completed(self) -> Sequence[int]:
        """Transfer ids that have completed since the last call, without waiting."""
        ...
