"""A DLPack capsule, as its consumer reads it."""

from ctypes import (
    POINTER,
    Structure,
    c_char_p,
    c_int32,
    c_int64,
    c_uint8,
    c_uint16,
    c_uint64,
    c_void_p,
    cast,
    py_object,
    pythonapi,
)


class Tensor(Structure):
    """DLPack's DLTensor."""

    _fields_ = (
        ("data", c_void_p),
        ("device_type", c_int32),
        ("device_id", c_int32),
        ("ndim", c_int32),
        ("code", c_uint8),
        ("bits", c_uint8),
        ("lanes", c_uint16),
        ("shape", POINTER(c_int64)),
        ("strides", POINTER(c_int64)),
        ("byte_offset", c_uint64),
    )


def read(capsule: object) -> Tensor:
    """The tensor in a capsule that nobody has taken. Good as long as the capsule."""
    get = pythonapi.PyCapsule_GetPointer
    get.restype = c_void_p
    get.argtypes = [py_object, c_char_p]
    return cast(get(capsule, b"dltensor"), POINTER(Tensor)).contents
