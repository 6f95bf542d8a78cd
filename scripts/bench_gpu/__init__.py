"""``scripts/bench gpu``: figures of the GPU path, each beside its peer and its limit."""
