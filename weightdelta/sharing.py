"""Memory that tensors of a model share: all of it (they are tied) or none of it.

Storing into a part that two names share would leave one of them wrong, so it is refused.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.lib.stride_tricks import as_strided

from weightdelta.errors import LayoutMismatch


@dataclass(frozen=True, slots=True)
class Place:
    """Where the elements of a tensor lie; equal for two tensors that are one.

    Attributes:
        address: Of the first element.
        strides: Bytes from one element to the next; 0 along a dimension of one element.
        width: Bytes of an element.
    """

    device: torch.device
    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    width: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "Place":
        """The place of a strided tensor."""
        shape, width = tuple(tensor.shape), tensor.element_size()
        strides = tuple(
            width * stride if size > 1 else 0
            for size, stride in zip(shape, tensor.stride(), strict=True)
        )
        return cls(tensor.device, tensor.data_ptr(), shape, strides, width)

    @property
    def end(self) -> int:
        """One past the last byte of the last element."""
        reach = sum((n - 1) * step for n, step in zip(self.shape, self.strides, strict=True))
        return self.address + reach + self.width


def refuse_overlaps(tensors: Mapping[str, torch.Tensor]) -> None:
    """Check that any two tensors share all of their memory or none of it.

    Raises:
        LayoutMismatch: Two of them share a part, or lie in the same memory in another shape.
    """
    names: dict[Place, str] = {}
    for name, tensor in tensors.items():
        if tensor.numel():
            names.setdefault(Place.of(tensor), name)
    for group in _neighbours(list(names)):
        clash = _clash(group)
        if clash:
            first, second = (names[place] for place in clash)
            raise LayoutMismatch(
                f"tensors {first!r} and {second!r} share a part of their memory in this model, or "
                "all of it in different shapes; both are published, and storing one would change "
                "the other: give each memory of its own"
            )


def _neighbours(places: Sequence[Place]) -> Iterator[list[Place]]:
    """Groups of places whose ranges of bytes reach into each other."""
    group: list[Place] = []
    end = 0
    for place in sorted(places, key=lambda p: (str(p.device), p.address)):
        if not group or group[0].device != place.device or place.address >= end:
            if len(group) > 1:
                yield group
            group, end = [], 0
        group.append(place)
        end = max(end, place.end)
    if len(group) > 1:
        yield group


def _clash(places: Sequence[Place]) -> tuple[Place, Place] | None:
    """Two places that share an element; strided ones may lie between each other's elements."""
    low = min(place.address for place in places)
    grain = math.gcd(*(n for p in places for n in (p.width, p.address - low, *p.strides)))
    taken = np.zeros((max(place.end for place in places) - low) // grain, np.bool_)
    for i, place in enumerate(places):
        here = _cells(taken, place, low, grain)
        if here.any():
            other = next(p for p in places[:i] if _meets(taken, p, place, low, grain))
            return other, place
        here[...] = True
    return None


def _meets(
    taken: np.ndarray[tuple[int], np.dtype[np.bool_]],
    one: Place,
    other: Place,
    low: int,
    grain: int,
) -> bool:
    taken[:] = False
    _cells(taken, one, low, grain)[...] = True
    return bool(_cells(taken, other, low, grain).any())


def _cells(
    taken: np.ndarray[tuple[int], np.dtype[np.bool_]], place: Place, low: int, grain: int
) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
    """The marks of a place's elements, ``width / grain`` each."""
    return as_strided(
        taken[(place.address - low) // grain :],
        (*place.shape, place.width // grain),
        (*(step // grain for step in place.strides), 1),
    )
