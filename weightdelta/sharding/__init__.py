"""How a training job's tensors are cut over its ranks, seen as boxes of the global tensors.

``explicit`` needs numpy alone; ``dtensor`` imports torch.
"""
