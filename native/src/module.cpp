#include <pybind11/pybind11.h>

PYBIND11_MODULE(_native, m) { m.doc() = "kvquota's native parts"; }
