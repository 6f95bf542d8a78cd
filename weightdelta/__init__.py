"""weightdelta: move new weights from trainer to samplers; cost follows what changed.

    group = wd.attach(trainers, state=lambda self: self.model, store="s3://bucket/run-7",
                      base="path/to/hf-checkpoint")
    stats = group.publish(step=3).wait()

    rx = wd.Receiver("s3://bucket/run-7", model)
    rx.prepare().wait()      # while serving
    rx.apply()               # in the pause

Importing this package loads neither torch nor ray; each name below loads what it needs.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray_actors.attach import TrainerGroup, attach
    from ray_actors.trainer import TrainerRank
    from weightdelta.config import Config
    from weightdelta.engines.transformers import TransformersEngine
    from weightdelta.errors import (
        InputError,
        ResyncError,
        RetryError,
        StopError,
        WeightDeltaError,
    )
    from weightdelta.preparation import Preparation
    from weightdelta.publisher import Publication, Publisher
    from weightdelta.receiver import Receiver
    from weightdelta.state import StateSource
    from weightdelta.stats import ApplyStats, PrepareStats, PublishStats
    from weightdelta.store import Store

__version__ = "0.1.0"

_HOMES = {
    "ApplyStats": "weightdelta.stats",
    "Config": "weightdelta.config",
    "InputError": "weightdelta.errors",
    "Preparation": "weightdelta.preparation",
    "PrepareStats": "weightdelta.stats",
    "Publication": "weightdelta.publisher",
    "PublishStats": "weightdelta.stats",
    "Publisher": "weightdelta.publisher",
    "Receiver": "weightdelta.receiver",
    "ResyncError": "weightdelta.errors",
    "RetryError": "weightdelta.errors",
    "StateSource": "weightdelta.state",
    "StopError": "weightdelta.errors",
    "Store": "weightdelta.store",
    "TrainerGroup": "ray_actors.attach",
    "TrainerRank": "ray_actors.trainer",
    "TransformersEngine": "weightdelta.engines.transformers",
    "WeightDeltaError": "weightdelta.errors",
    "attach": "ray_actors.attach",
}

__all__ = [
    "ApplyStats",
    "Config",
    "InputError",
    "Preparation",
    "PrepareStats",
    "Publication",
    "PublishStats",
    "Publisher",
    "Receiver",
    "ResyncError",
    "RetryError",
    "StateSource",
    "StopError",
    "Store",
    "TrainerGroup",
    "TrainerRank",
    "TransformersEngine",
    "WeightDeltaError",
    "__version__",
    "attach",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
