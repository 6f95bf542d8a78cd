"""The publisher actor: one a node, uploads what the node's trainer ranks hand over.

Trainer ranks compress on their own threads; the store's client runs here, so that it never
competes for a trainer's interpreter.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from weightdelta.config import Config
from weightdelta.store import Store


class NodePublisher:
    """Uploads objects. Names are unique to a publication, so a repeated upload is harmless.

    Attributes:
        store: Where to.
    """

    def __init__(self, store: str, config: Config) -> None:
        self.store = Store.of(store, config=config)

    def upload(self, name: str, parts: Sequence[npt.NDArray[np.uint8]]) -> int:
        """Write one rank's object; returns its size in bytes.

        Raises:
            StoreUnavailable, StoreTimeout: The store failed; the publication is lost.
        """
        buffers = [memoryview(part.data) for part in parts]
        self.store.write(name, buffers)
        return sum(len(b) for b in buffers)
