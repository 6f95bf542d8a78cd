"""Host memory that a Blackwell decompression engine reads from: not run here.

The driver's documentation asks of every buffer that ``cuMemBatchDecompressAsync`` touches that
it comes from ``cuMemAlloc``, from ``cuMemCreate`` with ``CU_MEM_CREATE_USAGE_HW_DECOMPRESS``, or
from a pool made with the like flag; memory of ``cudaHostAlloc`` is not among them. So raw blocks
on the host live in virtual memory on the device's NUMA node, made with that flag and mapped for
host and device. Memory on the device needs no care: torch's allocator uses ``cudaMalloc`` unless
it is set to expandable segments.

NOT RUN HERE: written from the documentation of the driver's virtual memory management; no GPU
with a decompression engine was at hand. What it allocates is usable on any GPU that supports the
memory; only ``capable`` depends on the engine.
"""

import ctypes
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt

from weightdelta.errors import ConfigError, DeviceMemory

U8 = npt.NDArray[np.uint8]

_INSTALL: Final = "install cuda-bindings, or use plain pinned memory and no decompression engine"


def _driver() -> Any:
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise ConfigError(f"cuda-bindings cannot be imported ({error}); {_INSTALL}") from error
    _checked(driver.cuInit(0), "cuInit")
    return driver


def _checked(answer: tuple[Any, ...], call: str) -> Any:
    """What a driver call returns beside its status."""
    if int(answer[0]):
        raise DeviceMemory(f"{call} failed with {answer[0]}; {_INSTALL}")
    return answer[1] if len(answer) > 1 else None


def algorithms(device: int) -> int:
    """Bit mask of what a device's engine decodes: 2 is Snappy, 4 is LZ4; 0 without an engine.

    Raises:
        ConfigError: cuda-bindings is not installed.
        DeviceMemory: The driver refused.
    """
    driver = _driver()
    name = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MEM_DECOMPRESS_ALGORITHM_MASK
    return int(_checked(driver.cuDeviceGetAttribute(name, device), "cuDeviceGetAttribute"))


class EngineBuffer:
    """Host memory near a device, writable here and readable by its decompression engine.

    Args:
        size: Bytes wanted; rounded up to what the driver allocates.
        device: CUDA device index.

    Raises:
        ConfigError: cuda-bindings is not installed, or the device cannot map such memory.
        DeviceMemory: The driver refused.

    Attributes:
        view: uint8, the memory; gone after :meth:`close`.
        capable: Whether the device's engine takes it.
    """

    def __init__(self, size: int, *, device: int) -> None:
        self._driver, self._device = _driver(), device
        self._address: Any = 0
        self._handle: Any = None
        self._mapped = False
        self.view: U8 = np.empty(0, np.uint8)
        self.capable = False
        try:
            self._take(size)
        except BaseException:
            self.close()
            raise

    def _attribute(self, name: str) -> int:
        found = getattr(self._driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(_checked(self._driver.cuDeviceGetAttribute(found, self._device), name))

    def _properties(self) -> Any:
        if not self._attribute("HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED"):
            raise ConfigError(f"device {self._device} cannot map host memory by NUMA node")
        driver = self._driver
        wanted = driver.CUmemAllocationProp()
        wanted.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        wanted.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_HOST_NUMA
        # -1: the system has one node, or does not say.
        wanted.location.id = max(self._attribute("HOST_NUMA_ID"), 0)
        wanted.allocFlags.usage = driver.CU_MEM_CREATE_USAGE_HW_DECOMPRESS
        return wanted

    def _take(self, size: int) -> None:
        driver, wanted = self._driver, self._properties()
        least = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        step = int(_checked(driver.cuMemGetAllocationGranularity(wanted, least), "granularity"))
        self._size = -(-max(size, 1) // step) * step
        self._handle = _checked(driver.cuMemCreate(self._size, wanted, 0), "cuMemCreate")
        reserved = driver.cuMemAddressReserve(self._size, 0, 0, 0)
        self._address = _checked(reserved, "cuMemAddressReserve")
        _checked(driver.cuMemMap(self._address, self._size, 0, self._handle, 0), "cuMemMap")
        self._mapped = True
        access = [self._access(host=True), self._access(host=False)]
        _checked(driver.cuMemSetAccess(self._address, self._size, access, 2), "cuMemSetAccess")
        name = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_IS_HW_DECOMPRESS_CAPABLE
        answer = driver.cuPointerGetAttribute(name, self._address)
        self.capable = bool(_checked(answer, "cuPointerGetAttribute"))
        memory = (ctypes.c_ubyte * self._size).from_address(int(self._address))
        self.view = np.frombuffer(memoryview(memory).cast("B"), np.uint8)

    def _access(self, *, host: bool) -> Any:
        driver = self._driver
        found = driver.CUmemAccessDesc()
        kinds, rights = driver.CUmemLocationType, driver.CUmemAccess_flags
        if host:
            found.location.type = kinds.CU_MEM_LOCATION_TYPE_HOST_NUMA
            found.location.id = max(self._attribute("HOST_NUMA_ID"), 0)
        else:
            found.location.type = kinds.CU_MEM_LOCATION_TYPE_DEVICE
            found.location.id = self._device
        found.flags = rights.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        return found

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """The memory as device code sees it: nvCOMP's ``as_arrays`` takes the object as it is."""
        return {
            "shape": (self._size,),
            "strides": None,
            "typestr": "|u1",
            "data": (int(self._address), False),
            "version": 3,
        }

    def close(self) -> None:
        """Give the memory back; all work that reads it must have ended."""
        self.view = np.empty(0, np.uint8)
        driver = self._driver
        if self._mapped:
            self._mapped = False
            _checked(driver.cuMemUnmap(self._address, self._size), "cuMemUnmap")
        if int(self._address):
            address, self._address = self._address, 0
            _checked(driver.cuMemAddressFree(address, self._size), "cuMemAddressFree")
        if self._handle is not None:
            handle, self._handle = self._handle, None
            _checked(driver.cuMemRelease(handle), "cuMemRelease")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
